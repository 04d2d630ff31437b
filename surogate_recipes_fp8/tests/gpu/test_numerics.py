"""The numerics report on the GPU: counts and ages equal those of the references, and training is the same with it."""

from __future__ import annotations

import pytest
import torch
from fp8_twin import LARGEST, NUMBERS, numbers, scale_of, value
from gpu.harness import Setup

from surogate_core.api import Op
from surogate_core.runtime.worker import Worker
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import same_bits
from surogate_recipes_fp8.formats import CLIPPED_ABOVE, COLUMNS, LOST_BELOW
from surogate_recipes_fp8.kernels.numerics import KERNELS
from surogate_recipes_fp8.reference import fp8_count, fp8_report

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", cases([(16, 16), (80, 272)], more=[(1, 8), (4096, 896), (16384, 4112)]))
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("kind", NUMBERS)
def test_counts_match_the_reference(shape: tuple[int, int], dtype: str, kind: str) -> None:
    x = numbers(kind, *shape)
    for scale in (torch.tensor([1 / 37.5, 37.5]), torch.zeros(2), scale_of(torch.tensor(1e-3), dtype)):
        check_counts(x, scale, dtype)


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_limits_themselves_are_neither_clipped_nor_kept(dtype: str) -> None:
    limits = torch.tensor([LARGEST[dtype], CLIPPED_ABOVE[dtype], LOST_BELOW[dtype], 0.0]).bfloat16()
    x = torch.cat([limits, limits * 1.0078125, -limits, limits * 0.9921875]).reshape(2, 8)
    check_counts(x, torch.ones(2), dtype)


def check_counts(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> None:
    ins = value("x", x), value("scale", scale)
    outs = value("amax", (2,), "fp32"), value("counts", (3,), "int64")
    op = Op("fp8_count", ins, outs, {"dtype": dtype})
    amax, counts = run_kernel(KERNELS, op, dict(zip(ins, (x, scale), strict=True)))
    expected = fp8_count(x, scale, dtype=dtype)
    assert same_bits(amax, expected[0]) and torch.equal(counts, expected[1])


@pytest.mark.parametrize("length", [0, 1, 4, 1000])
def test_a_report_matches_the_reference(length: int) -> None:
    quantizers, n = 37, 41
    history = torch.rand(length, quantizers) * (torch.rand(length, quantizers) < 0.7)
    history[:1] = 0
    columns = tuple(i if i < quantizers and length else -1 for i in range(n))
    maxima = tuple(LARGEST["e4m3" if i % 2 else "e5m2"] for i in range(n))
    amax = [torch.tensor([float(torch.rand(())), 0.0]) for _ in range(n)]
    counts = [torch.randint(0, 1 << 30, (3,)) * (i % 5 > 0) for i in range(n)]
    made_from = [history[:, c].max() if c >= 0 and i % 3 else torch.tensor(2.0) for i, c in enumerate(columns)]
    scales = [scale_of(a, "e4m3" if i % 2 else "e5m2") for i, a in enumerate(made_from)]
    scales[5] = torch.tensor([1.0, 0.0])
    tensors = [*([history] if length else []), *amax, *counts, *scales]
    ins = {value(f"v{i}", tensor): tensor for i, tensor in enumerate(tensors)}
    attrs = {"sizes": tuple(1 << (20 + i % 12) for i in range(n)), "maxima": maxima, "columns": columns}
    attrs["history"] = length > 0
    op = Op("fp8_report", tuple(ins), (value("out", (n, len(COLUMNS)), "fp32"),), attrs)
    (out,) = run_kernel(KERNELS, op, ins)
    assert same_bits(out, fp8_report(*tensors, **attrs))


@pytest.mark.parametrize("adapter", [None, {"lora_rank": 16}], ids=["full", "lora"])
def test_a_reported_step_computes_the_same_bits(adapter: dict[str, int] | None) -> None:
    setup = Setup(recipe="fp8-hybrid", deterministic="true", adapter=adapter, numerics=True)
    plain, reported = setup.gpu(), setup.gpu()
    for step in (1, 2, 3):
        both = [setup.step(w, step, step=step, reporting=w is reported and step > 1) for w in (plain, reported)]
        assert both[0] == both[1]
        table = reported.read_numerics()
        assert (table is None) == (step == 1)
        if table is not None:
            check_table(setup, table.values())
    states = [saved(setup, worker) for worker in (plain, reported)]
    assert all(same_bits(states[0][name], states[1][name]) for name in states[0])


def check_table(setup: Setup, rows: list[list[float]]) -> None:
    numerics = setup.assembly.numerics
    assert numerics is not None and len(rows) == len(numerics.tensors)
    for tensor, (amax, used, clipped, lost, age) in zip(numerics.tensors, rows, strict=True):
        assert amax > 0 and 0 < used < 8 and 0 <= clipped < 0.2 and 0 <= lost < 0.5, tensor
        assert age <= 2 and (age > 0) == tensor.name.endswith((".x", ".dy")), tensor


def saved(setup: Setup, worker: Worker) -> dict[str, torch.Tensor]:
    worker.settle()
    readings = setup.assembly.readings
    kept = [v for v in setup.assembly.declared if v.role in ("param", "state") and v not in readings]
    resident = set(setup.assembly.allocated)
    return {v.name: worker.buffers.persistent(v).clone().cpu() for v in kept if v in resident}
