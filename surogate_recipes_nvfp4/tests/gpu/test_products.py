"""NVFP4 products, compared with products of the dequantized factors in fp64.

Products of the emulation are exact in bf16, so only fp32 sums, the factor alpha and the output are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.devices import training_device
from surogate_core.testing.kernels import UNIT, same_bits
from surogate_core.testing.ops import Elements, as_inputs
from surogate_qlora_fp4.reference import fp4_block_quantize
from surogate_recipes_nvfp4.kernels import KERNELS
from surogate_recipes_nvfp4.ops import OPS
from surogate_recipes_nvfp4.reference import alpha, nvfp4_quantize, stored_alpha, stored_values, values

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}
SIZES = cases([(16, 32, 48), (144, 272, 400)], more=[(512, 256, 1024), (2048, 1024, 4096)])
"""m, n, k."""

EMULATED, IN_FP4 = 1e-6, 2e-3
"""Allowed relative rms errors. The order of sums in FP4 tensor cores is unknown."""

BACKENDS = [
    "emulate",
    pytest.param(
        "cublaslt",
        marks=pytest.mark.skipif((training_device().sm or 0) < 100, reason="needs a GPU of SM100 or later"),
    ),
]


def form(rows: int, columns: int, **attrs: Any) -> tuple[Tensor, ...]:
    """Return a form of random numbers of a random size."""
    x = torch.randn(rows, columns) * 10 ** float(torch.empty(1).uniform_(-4, 2))
    return nvfp4_quantize(x.bfloat16(), rows=True, columns=False, **attrs)


@dataclass
class Product:
    """A product with the contents of its inputs, its value in fp64, and what is added to it."""

    op: Op
    contents: dict[Value, Tensor]
    truth: Tensor
    added: Tensor

    def run(self, initial: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """Run eagerly and captured, and return the output. It initially contains `initial` or NaN."""
        op = replace(self.op, outs=self.op.ins[-1:]) if in_place else self.op
        given = {} if initial is None else {self.op.outs[0]: initial}
        (out,) = run_kernel(KERNELS, op, self.contents | given)
        return out

    def check(self, out: Tensor, initial: Tensor | None = None) -> None:
        """Besides the rounding of the output, and of the product before an addition to bf16."""
        expected = self.truth + self.added + (0 if initial is None else initial.double())
        adds = self.op.kind == "nvfp4_linear_add"
        rounding = UNIT[out.dtype] * (expected.abs() + (self.truth.abs() if adds else 0))
        excess = ((out.double() - expected).abs() - rounding).clamp(min=0)
        limit = EMULATED if self.op.attrs["backend"] == "emulate" else IN_FP4
        assert out.isfinite().all()
        assert float(excess.square().mean().sqrt()) <= limit * float(self.truth.square().mean().sqrt())


def product(
    sizes: tuple[int, int, int],
    *,
    backend: str = "emulate",
    kind: str = "nvfp4_linear",
    out: str = "bf16",
    bias: bool = False,
    accumulate: bool = False,
    trans_b: bool = False,
) -> Product:
    m, n, k = sizes
    a, b = form(m, k, four_over_six=True), form(k, n, square=True) if trans_b else form(n, k)
    right = values(*b[:2]).double()
    # `alpha` is a rounded fp32 number, whose rounding is not that of the product.
    truth = values(*a[:2]).double() @ (right if trans_b else right.T) * alpha(a[2], b[2]).double()
    rest = []
    if bias or kind == "nvfp4_linear_add":
        rest.append((torch.randn(*((n,) if bias else (m, n))) * truth.std().float()).bfloat16())
    dtypes = ("e2m1", "ue4m3", "fp32") * 2
    ins = as_inputs([*(Elements(t, dtype) for t, dtype in zip((*a, *b), dtypes, strict=True)), *rest])
    attrs: dict[str, Any] = {"dtype": out, "backend": backend, "trans_b": trans_b}
    (spec,) = DEFINITIONS[kind].infer(tuple(ins), attrs)
    value = Value("out", spec.shape, spec.dtype, "act")
    op = Op(kind, tuple(ins), (value,), attrs, accumulate=frozenset({0} if accumulate else ()))
    return Product(op, ins, truth, rest[0].double() if rest else torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("out", "bias"), [("bf16", False), ("bf16", True), ("fp32", False)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_of_the_dequantized_factors(sizes: tuple[int, int, int], out: str, bias: bool, backend: str) -> None:
    if backend == "cublaslt" and sizes[2] % 32:
        sizes = (*sizes[:2], 64)
    x = product(sizes, out=out, bias=bias, backend=backend)
    x.check(x.run())


@pytest.mark.parametrize(
    ("out", "kind"), [("bf16", "nvfp4_linear"), ("fp32", "nvfp4_linear"), ("bf16", "nvfp4_linear_add")]
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_factor_stored_along_the_other_dimension(sizes: tuple[int, int, int], out: str, kind: str) -> None:
    x = product(sizes, kind=kind, out=out, trans_b=True)
    x.check(x.run())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", cases([(144, 272, 416)], more=[(1024, 512, 4096)]), ids=str)
def test_accumulating_product_adds_to_its_output(sizes: tuple[int, int, int], backend: str) -> None:
    x = product(sizes, out="fp32", accumulate=True, backend=backend)
    initial = (torch.randn_like(x.truth) * x.truth.std()).float()
    x.check(x.run(initial), initial)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sizes", cases([(144, 272, 416)], more=[(2048, 512, 64)]), ids=str)
def test_product_may_take_the_place_of_what_it_adds_to(
    sizes: tuple[int, int, int], in_place: bool, backend: str
) -> None:
    x = product(sizes, kind="nvfp4_linear_add", backend=backend)
    x.check(x.run(in_place=in_place))


def stored_product(m: int, rows: tuple[int, ...], k: int, kind: str, out: str, bias: bool, backend: str) -> Product:
    """Return a product with a weight of matrices that differ by orders of magnitude."""
    n, a = sum(rows), form(m, k, four_over_six=True)
    sizes = (10 ** torch.empty(len(rows)).uniform_(-3, 1)).repeat_interleave(torch.tensor(rows))
    weight = fp4_block_quantize((torch.randn(n, k) * sizes[:, None]).bfloat16(), rows=rows, four_over_six=True)
    of_columns = stored_alpha(a[2], weight[2]).repeat_interleave(torch.tensor(rows))
    truth = values(*a[:2]).double() @ stored_values(*weight[:2]).double().T * of_columns.double()
    rest = []
    if bias or kind == "nvfp4_linear_add":
        rest.append((torch.randn(*((n,) if bias else (m, n))) * truth.std(dim=0).float()).bfloat16())
    dtypes = ("e2m1", "ue4m3", "fp32", "uint8", "e4m3", "fp32")
    ins = as_inputs([*(Elements(t, dtype) for t, dtype in zip((*a, *weight), dtypes, strict=True)), *rest])
    attrs: dict[str, Any] = {"dtype": out, "backend": backend, "stored": rows}
    (spec,) = DEFINITIONS[kind].infer(tuple(ins), attrs)
    op = Op(kind, tuple(ins), (Value("out", spec.shape, spec.dtype, "act"),), attrs)
    return Product(op, ins, truth, rest[0].double() if rest else torch.zeros((), dtype=torch.float64))


STORED = cases(
    [(48, (64,), 96), (144, (128, 256, 96), 416)], more=[(2048, (4096, 1024, 1024), 4096), (512, (384, 384), 12288)]
)
"""m, rows of the matrices, k."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "out", "bias"),
    [
        ("nvfp4_linear", "bf16", False),
        ("nvfp4_linear", "bf16", True),
        ("nvfp4_linear", "fp32", False),
        ("nvfp4_linear_add", "bf16", False),
    ],
)
@pytest.mark.parametrize("sizes", STORED, ids=str)
def test_each_matrix_of_a_stored_weight_has_its_own_factor(
    sizes: tuple[int, tuple[int, ...], int], kind: str, out: str, bias: bool, backend: str
) -> None:
    x = stored_product(*sizes, kind, out, bias, backend)
    found, at = x.run().cpu(), 0
    for rows in sizes[1]:
        own = slice(at, at + rows)
        added = x.added[..., own] if x.added.dim() else x.added
        replace(x, truth=x.truth[:, own], added=added).check(found[:, own])
        at += rows


def test_a_product_with_a_stored_weight_may_take_the_place_of_what_it_adds_to() -> None:
    x = stored_product(144, (128, 256, 96), 416, "nvfp4_linear_add", "bf16", False, "emulate")
    assert same_bits(x.run(in_place=True), x.run())


def test_every_code_with_every_scale_is_multiplied_exactly() -> None:
    """By a multiple of the unit matrix, so that no sum rounds."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(127 * 16, 1).view(127, 256)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    packed = torch.cat([packed, torch.zeros(1, 128, dtype=torch.uint8)])
    scales = torch.zeros(128, 16, dtype=torch.uint8)
    for row in range(127):
        for block in range(16):
            at = block // 4 * 512 + row % 32 * 16 + row // 32 * 4 + block % 4
            scales.view(-1)[at] = row
    a = (packed, scales.view(torch.float8_e4m3fn), torch.tensor([2688.0, 448.0]))
    unit = nvfp4_quantize(torch.eye(256).bfloat16() * 6, rows=True, columns=False)
    dtypes = ("e2m1", "ue4m3", "fp32") * 2
    ins = as_inputs([Elements(t, dtype) for t, dtype in zip((*a, *unit), dtypes, strict=True)])
    out = Value("out", (128, 256), "fp32", "act")
    op = Op("nvfp4_linear", tuple(ins), (out,), {"dtype": "fp32", "backend": "emulate"})
    (y,) = run_kernel(KERNELS, op, ins)
    assert torch.equal(y, values(*a[:2]) * values(*unit[:2]).max() * alpha(a[2], unit[2]))


def test_magnitudes_are_read_when_the_product_runs() -> None:
    """A graph that was captured once follows magnitudes that change from step to step."""
    x = product((64, 64, 64), out="fp32")
    binding = bind_kernel(KERNELS, x.op, x.contents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    out, amax_a, amax_b = (binding.buffers[v].tensor for v in (x.op.outs[0], x.op.ins[2], x.op.ins[5]))
    graph.replay()
    before = out.clone()
    amax_a[0] *= 4
    amax_b[0] /= 2
    graph.replay()
    assert same_bits(out, 2 * before)


def test_a_factor_that_is_not_finite_makes_the_product_nan() -> None:
    x = product((32, 48, 64))
    x.contents[x.op.ins[2]][0] = torch.nan
    (out,) = run_kernel(KERNELS, x.op, x.contents)
    assert out.isnan().all()


def test_equal_products_share_their_algorithm() -> None:
    x = product((1024, 256, 512), out="fp32")
    assert same_bits(x.run(), x.run())


def test_errors_name_the_invalid_argument() -> None:
    from surogate_recipes_nvfp4 import _C

    def launch(codes: int = 256, columns: int = 16, amax: int = 256, factors: int = 256) -> None:
        _C.nvfp4_dequantize(codes, 256, amax, 256, 16, columns, 256, 256, 256, 256, 16, 16, factors, 0.0, 0)

    for arguments, message in (
        ({"codes": 0}, "nvfp4_dequantize: codes of a is a null pointer"),
        ({"columns": 24}, "nvfp4_dequantize: columns of a must be a multiple of 16, got 24"),
        ({"amax": 0}, "nvfp4_dequantize: amax of a is a null pointer"),
        ({"factors": 8}, "nvfp4_dequantize: factors must be aligned to 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            launch(**arguments)
