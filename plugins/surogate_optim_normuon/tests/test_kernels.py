"""The launches of a step, carried out by torch on the CPU: batches, tables, addresses, products and their factors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Target, Value
from surogate_core.api.cublaslt import library_bytes
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.devices import device
from surogate_optim_normuon import batches as planned
from surogate_optim_normuon.batches import BATCH_BYTES, Shape, batches, flops, layout, workspace_bytes
from surogate_optim_normuon.kernels import KERNELS
from surogate_optim_normuon.reference import normuon

TARGET = Target(device("h200"), "true")
Params = Sequence[tuple[Sequence[int], int]]
PARAMS: Params = [((48, 16), 64), ((16, 48), 64), ((20,), 9), ((64,), 64), ((9,), 20)]
STACKS: Params = [((8,) * 9, 64), ((24,) * 9, 8)]
CODES = {0: torch.float32, 1: torch.bfloat16}


def update(params: Params = PARAMS, **attrs: Any) -> Op:
    """An op in fp32, in which the first param has a work copy and all have an amax."""
    n = len(params)
    shapes = [(sum(rows), columns) for rows, columns in params]

    def values(name: str, of: Callable[[tuple[int, int]], tuple[int, ...]]) -> list[Value]:
        return [Value(name=f"{name}{i}", shape=of(shape), dtype="fp32", role="state") for i, shape in enumerate(shapes)]

    grads, masters, momenta = (values(name, lambda shape: shape) for name in "gpm")
    kept = [*masters, *momenta, *values("v", lambda shape: shape[:1])]
    scalars = [
        Value(name=name, shape=(), dtype=dtype, role="input")
        for name, dtype in (("clip_coef", "fp32"), ("lr", "fp32"), ("step", "int32"), ("seed", "int64"))
    ]
    copy = Value(name="copy", shape=shapes[0], dtype="bf16", role="param")
    settings = {
        "n": n,
        "rows": tuple(tuple(rows) for rows, _ in params),
        "copied": (0,),
        "copy_dtypes": ("bf16",),
        "measured": tuple(range(n)),
        "weight_decay": 0.1,
        "streams": tuple(range(n)),
        "momentum": 0.9,
        "beta2": 0.95,
        "cautious": True,
        "lr_scale": "match_adamw",
        "method": "polar_express",
    }
    amaxes = values("amax", lambda shape: ())
    return Op("normuon", (*scalars, *grads, *kept), (*kept, copy, *amaxes), settings | attrs)


# ------------------------------------------------------------------------------------------------------------- batches


def test_matrices_of_equal_shape_are_in_one_batch() -> None:
    found = {batch.shape: batch.members for batch in batches(update())}
    assert found[Shape(16, 64)] == ((1, 0),)
    assert found[Shape(48, 64)] == ((1, 16),)
    assert {len(batch.members) for batch in batches(update([PARAMS[1]] * 3, copied=(), copy_dtypes=()))} == {3}


def test_matrices_with_and_without_a_work_copy_are_in_different_batches() -> None:
    assert [b.members for b in batches(update()) if b.shape == Shape(48, 64)] == [((0, 0),), ((1, 16),)]


def test_batches_fit_in_the_budget_and_are_of_nearly_equal_size() -> None:
    op = update([((1024,), 4096)] * 73, copied=(), copy_dtypes=())
    sizes = [len(batch.members) for batch in batches(op)]
    assert sum(sizes) == 73 and max(sizes) - min(sizes) <= 1 and len(sizes) == 7
    assert workspace_bytes(op) <= BATCH_BYTES < layout(Shape(1024, 4096), max(sizes) + 2).total


def test_small_matrices_are_in_batches_that_a_grid_can_have() -> None:
    op = update([((8,) * 100_000, 16)], copied=(), copy_dtypes=())
    assert [len(batch.members) for batch in batches(op)] == [50_000] * 2


def test_a_matrix_beyond_the_budget_is_a_batch_of_its_own() -> None:
    op = update([((4096,), 12288)] * 2, copied=(), copy_dtypes=())
    assert [len(batch.members) for batch in batches(op)] == [1, 1]
    assert BATCH_BYTES < workspace_bytes(op) < 1.05 * 2 * (2 * 4096 * 12288 + 2 * 4096**2)


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (7, 30), (30, 7), (2304, 2050), (4096, 12288)], ids=str)
def test_two_panels_save_a_quarter_of_the_symmetric_products(shape: tuple[int, int]) -> None:
    """All of an iteration take 4 m^2 n + 2 m^3, and the symmetric ones m^2 n and 2 m^3 of it."""
    m, n = sorted(Shape(*shape).padded)
    saved = (2 * m * m * n + 2 * m**3) // 4 if m == 4096 else 0
    assert flops(Shape(*shape)) == 4 * m * m * n + 2 * m**3 - saved


# ------------------------------------------------------------------------------------------------------------ launches


def at(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor at an address of the CPU's memory."""
    size = prod(shape) * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype).view(tuple(shape))


class Gemm:
    """A product as <surogate/gemm.h> defines it, by torch in fp32."""

    def __init__(self, *buffers: int, batch: int, **given: Any) -> None:
        self.batch, self.shape = batch, SimpleNamespace(**given)
        assert not any(buffers[:7])  # not timed, no bias and no scales

    def run_scaled(
        self, a: int, b: int, c: int, d: int, workspace: int, alpha: float, beta: float, stream: int
    ) -> None:
        s = self.shape
        assert (c != 0) == s.accumulate and d not in (a, b, c)
        assert not any(address % 16 for address in (a, b, c, d))
        left = self.matrices(a, (s.k, s.m) if s.trans_a else (s.m, s.k), s.lda, s.stride_a).float()
        right = self.matrices(b, (s.n, s.k) if s.trans_b else (s.k, s.n), s.ldb, s.stride_b).float()
        product = (left.mT if s.trans_a else left) @ (right.mT if s.trans_b else right) * alpha
        if c:
            product += beta * self.matrices(c, (s.m, s.n), s.ldd, s.stride_d).float()
        self.matrices(d, (s.m, s.n), s.ldd, s.stride_d).copy_(product)

    def matrices(self, address: int, shape: tuple[int, int], ld: int, stride: int) -> Tensor:
        rows, columns = shape
        size = (self.batch - 1) * stride + (rows - 1) * ld + columns
        return at(address, (size,), torch.bfloat16).as_strided((self.batch, rows, columns), (stride, ld, 1))


class Matrices:
    """The entries of a batch, as tensors."""

    def __init__(self, table: int, count: int, rows: int, columns: int) -> None:
        self.entries = at(table, (count, 8), torch.int64).tolist()
        self.rows, self.columns, self.shape = rows, columns, Shape(rows, columns)

    def column(self, index: int, dtype: torch.dtype, shape: Sequence[int] | None = None) -> list[Tensor]:
        size = (self.rows, self.columns) if shape is None else shape
        return [at(entry[index], size, dtype) for entry in self.entries]

    def workspace(self, address: int) -> Tensor:
        """[count, rows, columns] of the padded copies."""
        padded = at(address, (len(self.entries), *self.shape.padded), torch.bfloat16)
        return padded[:, : self.rows, : self.columns]


def clear(table: int, count: int, stream: int) -> None:
    for address in at(table, (count,), torch.int64).tolist():
        at(address, (), torch.float32).zero_()


def momentum(table: int, count: int, rows: int, columns: int, *arguments: Any) -> None:
    coef, _, _, x, norms, size, beta, grad, state, _ = arguments
    batch = Matrices(table, count, rows, columns)
    at(x, (count * batch.shape.elements,), torch.bfloat16).zero_()
    sums = at(norms, (count, size // count), torch.float32).zero_()
    columns_ = zip(batch.column(0, CODES[grad]), batch.column(2, CODES[state]), batch.workspace(x), sums, strict=True)
    for g, m, u, squares in columns_:
        g = g * at(coef, (), torch.float32) * (1 - beta)
        m.copy_(m * beta + g)
        u.copy_(g + m * beta)
        squares[0] = (g + m * beta).square().sum()


def normalize(table: int, count: int, rows: int, columns: int, *arguments: Any) -> None:
    x, norms, size, safety, epsilon, _ = arguments
    norm = at(norms, (count, size // count), torch.float32).sum(dim=1).sqrt()
    u = Matrices(table, count, rows, columns).workspace(x)
    u.copy_(u.float() / (norm * safety + epsilon)[:, None, None])


def mirror(square: int, count: int, side: int, height: int, stream: int) -> None:
    matrices = at(square, (count, side, side), torch.bfloat16)
    for end in range(height, side, height):
        matrices[:, end - height : end, end:] = matrices[:, end:, end - height : end].mT.clone()


def row_moments(table: int, count: int, rows: int, columns: int, *arguments: Any) -> None:
    _, o, scales, size, sums, sums_size, beta2, _ = arguments
    batch = Matrices(table, count, rows, columns)
    squares = batch.workspace(o).float().square().sum(dim=2)
    scale = at(scales, (count, size // count), torch.float32)
    for v, square, r in zip(batch.column(3, torch.float32, (rows,)), squares, scale, strict=True):
        v.copy_(v * beta2 + square / columns * (1 - beta2))
        r.copy_(1 / (v.sqrt() + 1e-10))
    totals = at(sums, (count, sums_size // count // 2, 2), torch.float32).zero_()
    totals[:, 0, 0], totals[:, 0, 1] = squares.sum(dim=1), (squares * scale.square()).sum(dim=1)


def update_(table: int, count: int, rows: int, columns: int, *arguments: Any) -> None:
    _, lr, _, _, o, scales, size, sums, sums_size, decay, cautious, factor, divided, master, copy, _ = arguments
    batch = Matrices(table, count, rows, columns)
    scale = at(scales, (count, size // count), torch.float32)
    norm, scaled = at(sums, (count, sums_size // count // 2, 2), torch.float32).sum(dim=1).sqrt().unbind(dim=1)
    total = norm / (scaled + 1e-10) * (factor / (norm + 1e-10) if divided else torch.tensor(factor))
    change = batch.workspace(o).float() * scale[:, :, None] * total[:, None, None]
    copies = batch.column(4, CODES[copy]) if copy >= 0 else [None] * count
    for p, u, c, amax in zip(
        batch.column(1, CODES[master]), change, copies, batch.column(5, torch.float32, ()), strict=True
    ):
        decays = p * decay * ((u * p >= 0) if cautious else 1)
        p.sub_(at(lr, (), torch.float32) * (decays + u))
        if c is not None:
            c.copy_(p)
        amax.copy_(torch.maximum(amax, (p if c is None else c).abs().max().float()))


FAKE = SimpleNamespace(
    Gemm=Gemm,
    clear=clear,
    momentum=momentum,
    normalize=normalize,
    mirror=mirror,
    row_moments=row_moments,
    update=update_,
)


class Context:
    """A `BindContext` of buffers in the CPU's memory."""

    target = TARGET
    stream = 0

    def __init__(self, op: Op) -> None:
        gen = torch.Generator().manual_seed(0)
        self.buffers: dict[Value, Tensor] = {}
        for value in dict.fromkeys((*op.ins, *op.outs)):
            x = torch.randn(value.shape, generator=gen) * 0.1
            self.buffers[value] = (x.square() if value.name[0] == "v" else x).to(TORCH_DTYPES[value.dtype])
        for value, number in zip(op.ins, (0.5, 0.02, 3, 5), strict=False):
            self.buffers[value].fill_(number)
        (kernel,) = KERNELS
        self.scratch = torch.full((kernel.workspace(op, TARGET),), 255, dtype=torch.uint8)
        self.tables: list[Tensor] = []

    def pointer(self, value: Value) -> int:
        return self.buffers[value].data_ptr()

    @property
    def workspace(self) -> int:
        return self.scratch.data_ptr()

    def call(self, function: Callable[..., None], *arguments: Any) -> Any:
        return function, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        self.tables.append(torch.tensor(words, dtype=torch.int64))
        return self.tables[-1].data_ptr()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    import surogate_optim_normuon

    monkeypatch.setitem(sys.modules, "surogate_optim_normuon._C", FAKE)
    monkeypatch.setattr(surogate_optim_normuon, "_C", FAKE, raising=False)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("lr_scale", ["match_adamw", "paper"])
@pytest.mark.parametrize("budget", [BATCH_BYTES, 1])
@pytest.mark.parametrize(
    ("params", "panels"),
    [(PARAMS, 2), (STACKS, 2), ([((256, 256), 300), ((520,), 256)], 2), ([((520,), 512)], 4)],
    ids=str,
)
def test_the_launches_of_a_step_are_the_reference_up_to_bf16_products(
    lr_scale: str, budget: int, params: Params, panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 operands of the products change an update by 1.5 %, that of matrices with eight rows by up to 4 %."""
    allowed = 0.05 if params is STACKS else 0.03
    monkeypatch.setattr(planned, "BATCH_BYTES", budget)
    monkeypatch.setattr(planned, "PANELS", panels)
    monkeypatch.setattr(planned, "PANEL_SIDE", 256)
    op = update(params, lr_scale=lr_scale)
    ctx = Context(op)
    before = {value: tensor.clone() for value, tensor in ctx.buffers.items()}
    theirs = normuon(*(before[v] for v in op.ins), **op.attrs)
    (kernel,) = KERNELS
    for launch in kernel.bind(op, ctx):  # type: ignore[arg-type, union-attr]
        function, arguments = launch.call  # type: ignore[union-attr]
        function(*arguments)
    for value, expected in zip(op.outs, theirs, strict=True):
        ours = ctx.buffers[value]
        if value.name[0] == "m":
            torch.testing.assert_close(ours, expected)
        elif value.name[0] == "p":
            step = expected - before[value]
            assert (ours - expected).norm() < allowed * step.norm(), value
        else:
            torch.testing.assert_close(ours, expected, rtol=0.05, atol=1e-3)


def test_the_workspace_has_a_part_for_cublaslt() -> None:
    (kernel,) = KERNELS
    assert kernel.workspace(update(), TARGET) == library_bytes(TARGET) + workspace_bytes(update())


def test_streams_are_words_of_the_table() -> None:
    from surogate_optim_normuon.kernels import table

    op = update(streams=(1, 2, 3, 4, 0xFFFFFFFF))
    (batch,) = (batch for batch in batches(op) if batch.members == ((4, 0),))
    words = table(op, batch, lambda value: 256)
    assert len(words) == 8 and words[-1] == 0xFFFFFFFF
