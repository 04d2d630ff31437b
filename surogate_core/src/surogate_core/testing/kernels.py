"""For tests of kernels on a GPU: buffers between guard bytes, tolerances, and eager against captured launches.

    x, w = guarded_copy(torch.randn(5, 64)), guarded_copy(torch.randn(64))
    y = guarded((5, 64), torch.float32)
    eager_and_graph(lambda stream: _C.scale(x.pointer, w.pointer, y.pointer, 5, 64, stream), [x, w, y])
    assert_close(y.tensor, x.tensor.double() * w.tensor.double(), torch.float32, length=1)

A launch takes a stream as an integer. Every buffer begins at a multiple of 256 bytes, as the planner's do, unless
`skew` moves it by some elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

GUARD_BYTES = int(os.environ.get("SUROGATE_GUARD_BYTES", 4096))
"""Before and behind every buffer. None under a tool that watches what lies outside of allocations, reads too."""
_GUARD = 0xA5
_POISON = 0xFF
"""A NaN in every floating-point dtype, -1 in the signed integers."""


@dataclass(frozen=True)
class Guarded:
    """A tensor in the middle of a larger allocation. `constant`: what it must still hold, for an input."""

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
        """AssertionError where something wrote outside of the tensor, or changed one that is an input."""
        for name, guard in (("before", self.before), ("behind", self.after)):
            wrong = (guard != _GUARD).nonzero().flatten()
            assert not len(wrong), (
                f"{len(wrong)} guard bytes {name} {list(self.tensor.shape)} were overwritten, first at {int(wrong[0])}"
            )
        if self.constant is not None:
            assert same_bits(self.tensor, self.constant), f"the input {list(self.tensor.shape)} was changed"


def guarded(shape: Sequence[int], dtype: torch.dtype, *, skew: int = 0, device: str = "cuda") -> Guarded:
    """A tensor full of NaN (all bits set) between guard bytes; `skew` elements past a multiple of 256 bytes."""
    shape = tuple(shape)
    size = torch.empty((), dtype=dtype).element_size()
    start, count = GUARD_BYTES + skew * size, prod(shape) * size
    raw = torch.full((start + count + GUARD_BYTES,), _GUARD, dtype=torch.uint8, device=device)  # at a multiple of 512
    raw[start : start + count] = _POISON
    tensor = raw[start : start + count].view(dtype).view(shape)
    return Guarded(tensor, raw[:start], raw[start + count :])


def guarded_copy(source: Tensor, *, constant: bool = True, skew: int = 0, device: str = "cuda") -> Guarded:
    """`source` on the device between guard bytes; `constant`: `check` also verifies that nobody wrote to it."""
    empty = guarded(source.shape, source.dtype, skew=skew, device=device)
    empty.tensor.copy_(source)
    return Guarded(empty.tensor, empty.before, empty.after, empty.tensor.clone() if constant else None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals itself, -0 differs from 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def eager_and_graph(launch: Callable[[int], None], buffers: Sequence[Guarded], scratch: Sequence[Guarded] = ()) -> None:
    """Run `launch` eagerly twice and then captured and replayed twice: the same bits each time, no guard overwritten.

    Before each run every buffer that is no input gets back what it holds now, so outputs that are added to can be
    tested as well. Afterwards the buffers hold the results of one run. `scratch` is filled with NaN before each run:
    no result may depend on what it held; of what a run leaves in it only the guards are checked.
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
"""Distance of neighbouring numbers just above 1: one unit in the last place is at most this part of a number."""


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """||ours - truth|| / ||truth||, in fp64."""
    a, b = ours.double(), truth.to(ours.device, torch.float64)
    return float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float64).tiny))


def assert_close(
    ours: Tensor, truth: Tensor, dtype: torch.dtype, length: int, magnitude: Tensor | float | None = None
) -> None:
    """Every element is finite and within one unit of `dtype` plus the error of `length` fp32 operations in a row.

    truth       in fp64, from the very inputs that the kernel saw
    length      number of terms of the longest sum (1: element-wise)
    magnitude   size of what is summed, of one element or of each: sum over |terms|, since terms may cancel. Default:
                the largest |truth|.

    The roundings of a sum are of random sign: `length` of them are off by about sqrt(length) half units of the
    running sum; 4 such deviations, and 4 half units for the operations around the sum, are allowed.
    """
    a, b = ours.double(), truth.to(ours.device, torch.float64)
    assert a.shape == b.shape, f"{list(a.shape)} against {list(b.shape)}"
    if not a.numel():
        return
    assert a.isfinite().all(), f"{int((~a.isfinite()).sum())} of {a.numel()} elements are not finite"
    size = b.abs().max() if magnitude is None else magnitude
    size = size.to(ours.device, torch.float64) if isinstance(size, Tensor) else size
    allowed = UNIT[dtype] * b.abs() + 4 * (1 + length**0.5) * 2.0**-24 * size
    excess = ((a - b).abs() - allowed).flatten()
    worst = int(excess.argmax())
    assert float(excess[worst]) <= 0, (
        f"{int((excess > 0).sum())} of {a.numel()} elements are off; element {worst} is {float(a.flatten()[worst])!r}, "
        f"should be {float(b.flatten()[worst])!r} +- {float(allowed.expand_as(a).flatten()[worst]):.3g}"
    )
