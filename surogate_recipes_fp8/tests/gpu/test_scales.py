"""Scales and amax history of all quantizers, compared with plain Python, step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from fp8_twin import FLT_MAX, LARGEST, run, scale_of, value
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.kernels import same_bits
from surogate_recipes_fp8.kernels.scales import KERNELS

pytestmark = pytest.mark.gpu

VECTOR = [(2.0, 224.0), (4.0, 112.0), (1.0, 112.0), (1.0, 112.0), (1.0, 112.0), (1.0, 448.0), (0.0, 448.0)]
"""amax and scale of each step, with a history of 4 and e4m3, by an independent implementation."""


def fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


class Quantizer:
    """Delayed scaling in plain Python, each result rounded to fp32."""

    def __init__(self, length: int, maximum: float) -> None:
        self.history, self.maximum, self.scale = [0.0] * length, maximum, [0.0, 0.0]

    def update(self, amax: float, clip_coef: float) -> None:
        if amax == 0 or not math.isfinite(clip_coef):
            self.scale = [1.0, 0.0] if self.scale == [0.0, 0.0] else self.scale
            return
        a = max([*self.history[1:], amax])
        self.history = [0.0, *self.history[2:], amax][: len(self.history)]
        with_zero = torch.tensor(self.maximum) / torch.tensor(a)
        encode = min(float(with_zero), FLT_MAX)
        self.scale = [float(1.0 / torch.tensor(encode)), encode]


def update_op(length: int, maxima: Sequence[float]) -> Op:
    n = len(maxima)

    def states(name: str) -> list[Value]:
        return [Value(name=f"{name}{i}", shape=(2,), dtype="fp32", role="state") for i in range(n)]

    history = Value(name="history", shape=(length, n), dtype="fp32", role="state")
    amax, scales = states("amax"), states("scale")
    ins = (Value(name="clip_coef", shape=(), dtype="fp32", role="act"), history, *amax, *scales)
    return Op("fp8_update", ins, (history, *scales, *amax), {"maxima": tuple(maxima)})


class Updates:
    """An op bound once, to states that live on the device over many steps."""

    def __init__(self, length: int, maxima: Sequence[float]) -> None:
        self.n, self.op = len(maxima), update_op(length, maxima)
        self.binding = bind_kernel(KERNELS, self.op, {v: torch.zeros(v.shape) for v in self.op.ins})

    def step(self, amax: Sequence[tuple[float, float]], clip_coef: float) -> tuple[Tensor, Tensor]:
        """Return (history, scales)."""
        tensors = [self.binding.buffers[v].tensor for v in self.op.ins]
        tensors[0].fill_(clip_coef)
        for tensor, pair in zip(tensors[2 : 2 + self.n], amax, strict=True):
            tensor.copy_(torch.tensor(pair))
        self.binding.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        for buffer in list(self.binding.buffers.values())[1:]:
            buffer.check()
        assert all(not bool(tensor.any()) for tensor in tensors[2 : 2 + self.n])
        return tensors[1].cpu(), torch.stack([tensor.cpu() for tensor in tensors[2 + self.n :]])


@pytest.mark.parametrize(("length", "n"), [(1, 3), (2, 5), (4, 33), (31, 8), (33, 64), (1024, 70)])
def test_updates_match_plain_python_step_by_step(length: int, n: int) -> None:
    """Some amax are 0 (unused) or tiny (the scale would overflow), some steps are skipped."""
    draw = random.Random(length)
    maxima = [draw.choice(list(LARGEST.values())) for _ in range(n)]
    twins = [Quantizer(length, maximum) for maximum in maxima]
    updates = Updates(length, maxima)
    for step in range(3 * min(length, 40) + 8):
        amax = [draw.choice([0.0, 1e-44, fp32(10.0 ** draw.uniform(-6, 6)), fp32(draw.random())]) for _ in range(n)]
        coef = draw.choice([1.0, 0.25, 1.0, math.nan if step % 2 else math.inf])
        for twin, top in zip(twins, amax, strict=True):
            twin.update(fp32(top), coef)
        history, scales = updates.step([(top, draw.choice([0.0, 1.0])) for top in amax], coef)
        assert same_bits(history, torch.tensor([twin.history for twin in twins]).T.contiguous())
        assert same_bits(scales, torch.tensor([twin.scale for twin in twins]))


def test_updates_match_an_independent_vector() -> None:
    updates = Updates(4, [LARGEST["e4m3"]])
    for amax, encode in VECTOR:
        history, scales = updates.step([(amax, 0.0)], 1.0)
        assert float(scales[0, 1]) == encode
    assert history.flatten().tolist() == [0.0, 1.0, 1.0, 1.0]


def test_an_update_is_the_same_when_captured() -> None:
    op = update_op(1024, [LARGEST["e4m3"]] * 40)
    contents = {v: torch.rand(v.shape) for v in op.ins}
    run_kernel(KERNELS, op, contents)


@pytest.mark.parametrize("scalars", [False, True])
def test_scales_of_many_tensors_match_the_twin(scalars: bool) -> None:
    tops = [0.0, 1e-44, 1e-36, 0.02, 1.0, 3e38, *torch.rand(700).tolist()]
    amax = [torch.tensor(top) if scalars else torch.tensor([top, 1.0]) for top in tops]
    sources = {value(f"amax{i}", tensor): tensor for i, tensor in enumerate(amax)}
    outs = tuple(value(f"scale{i}", (2,), "fp32") for i in range(len(tops)))
    out = run_kernel(KERNELS, Op("fp8_scales", tuple(sources), outs, {"maximum": 448.0}), sources)
    for scale, top in zip(out, tops, strict=True):
        assert same_bits(scale, scale_of(torch.tensor(top), "e4m3"))


@pytest.mark.parametrize("flagged", [None, 0, 299])
@pytest.mark.parametrize("n", [1, 300])
def test_the_guard_turns_a_flag_into_a_step_that_is_skipped(n: int, flagged: int | None) -> None:
    flags = [float(i == flagged) for i in range(n)]
    states = {value(f"amax{i}", torch.tensor([3.0, flag])): torch.tensor([3.0, flag]) for i, flag in enumerate(flags)}
    norm, coef, guarded = (value(name, (), "fp32") for name in ("norm", "clip_coef", "guarded"))
    op = Op("fp8_guard", (norm, coef, *states), (norm, guarded), {})
    out = run(KERNELS, op, {norm: torch.tensor(2.5), coef: torch.tensor(0.4), **states})
    if any(flags):
        assert float(out["norm"]) == math.inf and math.isnan(float(out["guarded"]))
    else:
        assert same_bits(out["norm"], torch.tensor(2.5)) and same_bits(out["guarded"], torch.tensor(0.4))
