"""Kernels of GeGLU and of the embedding's factor, compared with the references in fp64."""

from __future__ import annotations

import pytest
import torch

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.kernels import assert_close, same_bits
from surogate_models_gemma import reference
from surogate_models_gemma.kernels import KERNELS

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (7, 5), (33, 264), (3, 6912), (2, 70_001)]


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_geglu_and_its_gradient_match_fp64(shape: tuple[int, int], dtype: str, skew: int) -> None:
    rows, width = shape
    kind = TORCH_DTYPES[dtype]
    gate_up, dy = (3 * torch.randn(rows, 2 * width)).to(kind), torch.randn(rows, width).to(kind)

    def value(name: str, columns: int) -> Value:
        return Value(name, (rows, columns), dtype, "act")

    given, half, gradient = value("gate_up", 2 * width), value("out", width), value("d_gate_up", 2 * width)
    (out,) = run_kernel(KERNELS, Op("geglu", (given,), (half,)), {given: gate_up}, skew=skew)
    assert_close(out, reference.geglu(gate_up.double()), kind, 9, 10.0)
    top = value("dy", width)
    op = Op("geglu_bwd", (top, given), (gradient,))
    (found,) = run_kernel(KERNELS, op, {top: dy, given: gate_up}, skew=skew)
    assert_close(found, reference.geglu_bwd(dy.double(), gate_up.double()), kind, 20, 20.0)


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_has_the_bits_of_the_reference(shape: tuple[int, int], dtype: str, skew: int) -> None:
    x = torch.randn(shape).to(TORCH_DTYPES[dtype])
    ins, outs = Value("x", shape, dtype, "act"), Value("scaled", shape, dtype, "act")
    (out,) = run_kernel(KERNELS, Op("scale", (ins,), (outs,), {"factor": 3072**0.5}), {ins: x}, skew=skew)
    assert same_bits(out, reference.scale(x, factor=3072**0.5))
