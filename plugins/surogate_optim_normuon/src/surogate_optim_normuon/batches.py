"""The matrices of an op in batches of equal shape, their products, and the workspace of a batch. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from surogate_core.api import Op
from surogate_core.api.param_update import column_of

BATCH_BYTES = 256 << 20
"""Workspace of a batch, unless one matrix needs more. 12 matrices of 1024 x 4096 fit: enough tiles for an H200."""

MOST = 65_535
"""Most matrices of a batch: a grid has so many blocks in its second dimension, and cuBLASLt such a batch."""

PANELS = 2
"""Panels that a symmetric product is computed in, each up to the diagonal: of two, three quarters are computed."""

PANEL_SIDE = 2048
"""The least side of products in panels. Panels of smaller ones do not fill a GPU with tiles."""

CHUNK = 32768
"""Elements that a thread block of normuon.cu processes."""

ROWS = 16
"""Rows whose second moments a thread block of normuon.cu computes."""


@dataclass(frozen=True)
class Shape:
    """The shape of a matrix. Its copy in the workspace is padded with zeros to multiples of 8, which cuBLASLt needs."""

    rows: int
    columns: int

    @property
    def padded(self) -> tuple[int, int]:
        return _rounded(self.rows, 8), _rounded(self.columns, 8)

    @property
    def elements(self) -> int:
        """Elements of the padded copy."""
        return self.padded[0] * self.padded[1]

    @property
    def is_wide(self) -> bool:
        return self.rows <= self.columns

    @property
    def side(self) -> int:
        """Rows, and columns, of the square matrices of the iterations."""
        return min(self.padded)

    @property
    def panels(self) -> int:
        """Panels of the symmetric products. Their addresses are multiples of 256 bytes."""
        return PANELS if self.side >= PANEL_SIDE and self.side % (128 * PANELS) == 0 else 1

    @property
    def chunks(self) -> int:
        return ceil(self.elements / CHUNK)

    @property
    def row_blocks(self) -> int:
        return ceil(self.rows / ROWS)


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape and equal dtypes: (index of the param, first row) each."""

    shape: Shape
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """Offsets of the buffers of a batch in its workspace, in bytes.

    x, y           bf16 [count, *padded]: the matrix before and after an iteration
    a, b           bf16 [count, side, side]
    norms, scales, sums
                   fp32 [count, chunks], [count, rows], [count, row_blocks, 2]
    """

    x: int
    y: int
    a: int
    b: int
    norms: int
    scales: int
    sums: int
    total: int


@dataclass(frozen=True)
class Product:
    """D[m,n] = op(A)[m,k] op(B)[k,n], row-major, in each matrix of a batch. A transposed operand is stored as [k,m] or
    [n,k]. Strides are in elements.
    """

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    lda: int
    ldb: int
    ldd: int
    stride_a: int
    stride_b: int
    stride_d: int


@dataclass(frozen=True)
class Panel:
    """Rows of a product from row `first` on: of a symmetric one, their columns up to the diagonal."""

    product: Product
    first: int

    @property
    def bytes_a(self) -> int:
        """Bytes from the address of A to the first element that is read."""
        return 2 * self.first * (1 if self.product.trans_a else self.product.lda)

    @property
    def bytes_d(self) -> int:
        """Bytes from the address of D to the first element that is written."""
        return 2 * self.first * self.product.ldd


Iteration = tuple[tuple[Panel, ...], tuple[Panel, ...], tuple[Panel, ...]]


def iteration(shape: Shape) -> Iteration:
    """Return the products of an iteration: A = X X^T, A A, and B X; or X^T X, A A, and X B if X has more rows.

    The first two are symmetric: they are computed in `shape.panels`, and mirrored afterwards.
    """
    (rows, columns), side = shape.padded, shape.side
    x, square = (columns, shape.elements), (side, side * side)  # row stride and size

    def of(
        m: int, n: int, k: int, trans: tuple[bool, bool], a: tuple[int, int], b: tuple[int, int], d: tuple[int, int]
    ) -> Product:
        return Product(m, n, k, *trans, a[0], b[0], d[0], a[1], b[1], d[1])

    def symmetric(k: int, trans: tuple[bool, bool], a: tuple[int, int]) -> tuple[Panel, ...]:
        height = side // shape.panels
        return tuple(
            Panel(of(height, first + height, k, trans, a, a, square), first) for first in range(0, side, height)
        )

    squares = symmetric(side, (False, True), square)
    if shape.is_wide:
        last = of(side, columns, side, (False, False), square, x, x)
        return symmetric(columns, (False, True), x), squares, (Panel(last, 0),)
    last = of(rows, side, side, (False, True), x, square, x)
    return symmetric(rows, (True, False), x), squares, (Panel(last, 0),)


def flops(shape: Shape) -> int:
    """Return the floating-point operations of an iteration."""
    return sum(2 * panel.product.m * panel.product.n * panel.product.k for part in iteration(shape) for panel in part)


def traffic(shape: Shape) -> int:
    """Return the bytes that the products of an iteration read and write if each reads its operands once."""
    return 2 * (4 * shape.elements + 4 * shape.side**2)


def layout(shape: Shape, count: int) -> Layout:
    """Return the layout of the workspace for a batch of `count` matrices."""
    x, square = 2 * count * shape.elements, 2 * count * shape.side**2
    vectors = (4 * count * size for size in (shape.chunks, shape.rows, 2 * shape.row_blocks))
    sizes = (x, x, square, square, *vectors)
    return Layout(*accumulate((_rounded(size, 256) for size in sizes), initial=0))


def batches(op: Op) -> list[Batch]:
    """Return the matrices of a `normuon` op: of equal shape and dtypes, in as few batches as `BATCH_BYTES` allows."""
    copies = dict(zip(op.attrs["copied"], op.attrs["copy_dtypes"], strict=True))
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for i, (parts, *values) in enumerate(zip(op.attrs["rows"], *(column_of(op, j) for j in range(3)), strict=True)):
        dtypes = (*(value.dtype for value in values), copies.get(i))
        columns = values[0].shape[1]
        for first, count in zip(accumulate(parts, initial=0), parts, strict=False):
            alike.setdefault((Shape(count, columns), dtypes), []).append((i, first))
    return [Batch(shape, part) for (shape, _), members in alike.items() for part in _divided(shape, members)]  # type: ignore[arg-type]


def workspace_bytes(op: Op) -> int:
    """Return the bytes of workspace of the largest batch."""
    return max(layout(batch.shape, len(batch.members)).total for batch in batches(op))


def _divided(shape: Shape, members: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the matrices in the fewest batches that fit, of nearly equal size."""
    count = ceil(len(members) / min(MOST, max(1, BATCH_BYTES // layout(shape, 1).total)))
    bounds = [len(members) * i // count for i in range(count + 1)]
    for begin, end in pairwise(bounds):
        yield tuple(members[begin:end])


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
