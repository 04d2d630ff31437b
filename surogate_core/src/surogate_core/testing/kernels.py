"""Tests of kernels on a GPU: buffers between guard bytes, tolerances, eager and captured launches.

    x, w = guarded_copy(torch.randn(5, 64)), guarded_copy(torch.randn(64))
    y = guarded((5, 64), torch.float32)
    eager_and_graph(lambda stream: _C.scale(x.pointer, w.pointer, y.pointer, 5, 64, stream), [x, w, y])
    assert_close(y.tensor, x.tensor.double() * w.tensor.double(), torch.float32, length=1)

A launch takes a stream as an integer. Every buffer begins at a multiple of 256 bytes, as planned buffers do, plus
`skew` elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_GUARD_BYTES = int(os.environ.get("SUROGATE_GUARD_BYTES", 4096))
"""Guard bytes before and after each buffer. Set it to 0 for tools that check accesses outside allocations."""
_GUARD = 0xA5
_POISON = 0xFF
"""Byte that gives NaN in every floating-point dtype, and -1 in signed integers."""


@dataclass(frozen=True)
class Guarded:
    """A tensor in the middle of a larger allocation. `constant` is the content that an input must keep."""

    tensor: Tensor
    before: Tensor
    after: Tensor
    constant: Tensor | None = None

    @property
    def pointer(self) -> int:
        """Device address of the first element."""
        return self.tensor.data_ptr()

    def poison(self) -> None:
        """Fill the tensor with NaN."""
        self.tensor.view(-1).view(torch.uint8).fill_(_POISON)

    def check(self) -> None:
        """Raise AssertionError if something wrote outside the tensor, or changed an input."""
        for name, guard in (("before", self.before), ("after", self.after)):
            wrong = (guard != _GUARD).nonzero().flatten()
            assert not len(wrong), (
                f"{len(wrong)} guard bytes {name} {list(self.tensor.shape)} were overwritten, first at {int(wrong[0])}"
            )
        if self.constant is not None:
            assert same_bits(self.tensor, self.constant), f"the input {list(self.tensor.shape)} was changed"


def guarded(shape: Sequence[int], dtype: torch.dtype, *, skew: int = 0, device: str = "cuda") -> Guarded:
    """Return a tensor of NaN (all bits set) between guard bytes, `skew` elements after a multiple of 256 bytes."""
    shape = tuple(shape)
    size = torch.empty((), dtype=dtype).element_size()
    start, count = _GUARD_BYTES + skew * size, prod(shape) * size
    raw = torch.full((start + count + _GUARD_BYTES,), _GUARD, dtype=torch.uint8, device=device)  # torch aligns to 512
    raw[start : start + count] = _POISON
    tensor = raw[start : start + count].view(dtype).view(shape)
    return Guarded(tensor, raw[:start], raw[start + count :])


def guarded_copy(source: Tensor, *, constant: bool = True, skew: int = 0, device: str = "cuda") -> Guarded:
    """Return a copy of `source` on the device between guard bytes. If `constant`, `check` verifies it is unchanged."""
    empty = guarded(source.shape, source.dtype, skew=skew, device=device)
    empty.tensor.copy_(source)
    return Guarded(empty.tensor, empty.before, empty.after, empty.tensor.clone() if constant else None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits: NaN equals NaN, -0 differs from 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def plain_nan(x: Tensor) -> Tensor:
    """Return an fp32 or bf16 tensor with one kind of NaN in place of all, and tensors of other dtypes as they are."""
    return x.masked_fill(x.isnan(), torch.nan) if x.dtype in (torch.float32, torch.bfloat16) else x


def assert_same_values(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Check without tolerance that tensors are the same. Only the bits of NaN in fp32 and bf16 may differ."""
    for i, (a, b) in enumerate(zip(map(plain_nan, ours), map(plain_nan, theirs), strict=True)):
        assert same_bits(a, b), f"output {i}: {int((a.double() != b.double()).sum())} of {a.numel()} elements differ"


def eager_and_graph(launch: Callable[[int], None], buffers: Sequence[Guarded], scratch: Sequence[Guarded] = ()) -> None:
    """Check that two eager runs and two replays of a graph give the same bits and overwrite no guard bytes.

    Before each run, every buffer that is not constant gets its present contents again, so outputs that accumulate can
    be tested too. Afterwards the buffers hold the results of one run. `scratch` is filled with NaN before each run, so
    no result may depend on its contents. Of `scratch`, only the guards are checked.
    """
    written = [b for b in buffers if b.constant is None]
    initial = [b.tensor.clone() for b in written]

    def restore() -> None:
        for buffer, contents in zip(written, initial, strict=True):
            buffer.tensor.copy_(contents)
        for buffer in scratch:
            buffer.poison()

    def results() -> list[Tensor]:
        torch.cuda.synchronize()
        for buffer in (*buffers, *scratch):
            buffer.check()
        return [b.tensor.clone() for b in written]

    restore()
    launch(torch.cuda.current_stream().cuda_stream)
    first = results()
    restore()
    launch(torch.cuda.current_stream().cuda_stream)
    _compare(first, results(), "the second eager run")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch(torch.cuda.current_stream().cuda_stream)
    for replay in ("the first replay", "the second replay"):
        restore()
        graph.replay()
        _compare(first, results(), replay)


def _compare(expected: Sequence[Tensor], actual: Sequence[Tensor], run: str) -> None:
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert same_bits(a, b), f"{run}: output {i} {list(a.shape)} differs from the first run"


# --------------------------------------------------------------------------------------------------------- tolerances

UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
"""Distance from 1 to the next larger number: a unit in the last place is at most this fraction of a number."""


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """Return ||ours - truth|| / ||truth||, in fp64."""
    a, b = ours.double(), truth.to(ours.device, torch.float64)
    return float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float64).tiny))


def assert_close(
    ours: Tensor, truth: Tensor, dtype: torch.dtype, length: int, magnitude: Tensor | float | None = None
) -> None:
    """Check that all elements are finite and within one unit of `dtype` plus the error of `length` fp32 operations.

    truth       in fp64, computed from exactly the inputs of the kernel
    length      number of terms of the longest sum (1: element-wise)
    magnitude   sum over |terms|, for all elements or for each, because terms may cancel. Default: the largest |truth|.

    The rounding errors of a sum have random signs: `length` of them add up to about sqrt(length) half units of the
    running sum. Allowed are 4 such deviations, and 4 half units for the operations around the sum.
    """
    a, b = ours.double(), truth.to(ours.device, torch.float64)
    assert a.shape == b.shape, f"shape {list(a.shape)}, expected {list(b.shape)}"
    if not a.numel():
        return
    assert a.isfinite().all(), f"{int((~a.isfinite()).sum())} of {a.numel()} elements are not finite"
    size = b.abs().max() if magnitude is None else magnitude
    size = size.to(ours.device, torch.float64) if isinstance(size, Tensor) else size
    allowed = UNIT[dtype] * b.abs() + 4 * (1 + length**0.5) * 2.0**-24 * size
    excess = ((a - b).abs() - allowed).flatten()
    worst = int(excess.argmax())
    assert float(excess[worst]) <= 0, (
        f"{int((excess > 0).sum())} of {a.numel()} elements are wrong; element {worst} is "
        f"{float(a.flatten()[worst])!r}, expected {float(b.flatten()[worst])!r} +- "
        f"{float(allowed.expand_as(a).flatten()[worst]):.3g}"
    )
