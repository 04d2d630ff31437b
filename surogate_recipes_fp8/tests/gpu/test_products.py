"""FP8 products, bound through their KernelDefs and compared with products of the dequantized operands in fp64.

The sums of FP8 products are less exact than fp32: tensor cores of Hopper add with 14 bits, and promote the sum to fp32
after every 128 terms, or never with `fast`. Measured on an H200 with operands of random sign, the relative rms error is
1.0e-4 to 1.3e-4 for any length, with `fast` 1.2e-3 from 4096 terms on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES, ConfigError, Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.devices import training_device
from surogate_core.testing.kernels import UNIT, guarded, same_bits
from surogate_recipes_fp8.kernels import products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif((training_device().sm or 0) < 89, reason="needs a GPU of SM89 or later"),
]

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
EXACT, FAST = 3e-4, 3e-3
"""Allowed relative rms errors."""


@dataclass
class Product:
    """A product op with the contents of its operands, its product in fp64, and what is added to it."""

    op: Op
    contents: dict[Value, Tensor]
    terms: Tensor
    added: Tensor
    tolerance: float

    @property
    def out(self) -> Value:
        return self.op.outs[0]

    def run(self, initial: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """Bind the op, run it eagerly and captured, and return the output. It initially contains `initial` or NaN."""
        given = {} if initial is None else {self.out: initial}
        op = replace(self.op, outs=self.op.ins[-1:]) if in_place else self.op
        (out,) = run_kernel(products.KERNELS, op, self.contents | given)
        return out.cuda()

    def check(self, out: Tensor, initial: Tensor | None = None) -> None:
        """Compare with the truth, besides the rounding of the output, and of the product before an addition to bf16."""
        truth = self.terms + self.added + (0 if initial is None else initial.double())
        unit = UNIT[out.dtype]
        rounding = unit * (truth.abs() + (self.terms.abs() if self.op.kind == "fp8_linear_add" else 0))
        excess = ((out.double() - truth).abs() - rounding).clamp(min=0)
        assert out.isfinite().all()
        size = float(self.terms.square().mean().sqrt())
        scatter = 1 + 2 * out.numel() ** -0.5  # of an rms of few errors, over that of few terms
        assert float(excess.square().mean().sqrt()) <= self.tolerance * size * scatter
        assert float(excess.max()) <= 20 * self.tolerance * size


def quantized(shape: Sequence[int], dtype: str, *, positive: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return random FP8 numbers, their (decode, encode) scale, and what they stand for in fp64."""
    x = torch.randn(*shape, device="cuda") * 10 ** float(torch.empty(1).uniform_(-3, 1))
    x = x.abs() if positive else x
    encode = LARGEST[dtype] / x.abs().max()
    q = (x * encode).clamp(-LARGEST[dtype], LARGEST[dtype]).to(TORCH_DTYPES[dtype])
    scale = torch.stack((1 / encode, encode))
    return q, scale, q.float().double() * scale[0].double()


def product(
    kind: str,
    sizes: tuple[int, int, int],
    dtypes: Sequence[str],
    *,
    fast: bool = False,
    accumulate: bool = False,
    positive: bool = False,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Product:
    """Return a product with random inputs. `dtypes` are those of (ins..., out), as in a KernelDef."""
    (m, n, k), (a_dtype, b_dtype, *_, out_dtype) = sizes, dtypes
    (qa, scale_a, a), (qb, scale_b, b) = (
        quantized(shape, dtype, positive=positive) for shape, dtype in (((m, k), a_dtype), ((n, k), b_dtype))
    )
    tensors = [qa.T.contiguous() if trans_a else qa, qb.T.contiguous() if trans_b else qb, scale_a, scale_b]
    terms = a @ b.T
    added = torch.zeros((), dtype=torch.float64, device="cuda")
    if len(dtypes) == 6:
        shape = (m, n) if kind == "fp8_linear_add" else (n,)
        tensors.append((torch.randn(*shape, device="cuda") * terms.std().float()).bfloat16())
        added = tensors[-1].double()
    ins = tuple(
        Value(name=f"in{i}", shape=tuple(tensor.shape), dtype=dtype, role="act")
        for i, (tensor, dtype) in enumerate(zip(tensors, dtypes[:-1], strict=True))
    )
    out = Value(name="out", shape=(m, n), dtype=out_dtype, role="act")
    attrs = {"dtype": out_dtype, "fast": fast, "trans_a": trans_a, "trans_b": trans_b}
    op = Op(kind, ins, (out,), attrs, accumulate=frozenset({0} if accumulate else ()))
    return Product(op, dict(zip(ins, tensors, strict=True)), terms, added, FAST if fast else EXACT)


def algorithm(x: Product) -> str:
    (bound,) = bind_kernel(products.KERNELS, x.op, x.contents).launches
    return str(bound.call[0].__self__.describe())


SIGNATURES = [(kernel.op, kernel.dtypes) for kernel in products.KERNELS]
PLAIN = ("e4m3", "e4m3", "fp32", "fp32")


@pytest.mark.parametrize(("kind", "dtypes"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("sizes", cases([(7, 24, 16), (129, 264, 272)], more=[(1, 8, 4096), (512, 96, 128)]), ids=str)
def test_product_of_the_dequantized_operands(
    kind: str, dtypes: Sequence[str], fast: bool, sizes: tuple[int, int, int]
) -> None:
    x = product(kind, sizes, dtypes, fast=fast)
    x.check(x.run())


@pytest.mark.exhaustive
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize(("b", "out"), [("e4m3", "bf16"), ("e5m2", "bf16"), ("e5m2", "fp32")])
@pytest.mark.parametrize("sizes", [(4096, 6144, 4096), (2048, 4096, 12288), (4096, 1024, 8192)], ids=str)
def test_product_of_a_training_step(b: str, out: str, fast: bool, sizes: tuple[int, int, int]) -> None:
    x = product("fp8_linear", sizes, ("e4m3", b, "fp32", "fp32", out), fast=fast)
    x.check(x.run())


@pytest.mark.parametrize("pair", products.PAIRS, ids="-".join)
@pytest.mark.parametrize("sizes", cases([(7, 20, 16), (129, 264, 272)], more=[(1024, 512, 4096)]), ids=str)
def test_accumulating_product_adds_to_its_output(pair: tuple[str, str], sizes: tuple[int, int, int]) -> None:
    x = product("fp8_linear", sizes, (*pair, "fp32", "fp32", "fp32"), accumulate=True)
    initial = (torch.randn_like(x.terms) * x.terms.std()).float()
    x.check(x.run(initial), initial)


@pytest.mark.parametrize("pair", products.PAIRS, ids="-".join)
@pytest.mark.parametrize("sizes", cases([(7, 24, 16), (129, 264, 272)], more=[(4096, 512, 48)]), ids=str)
def test_product_may_take_the_place_of_what_it_adds_to(pair: tuple[str, str], sizes: tuple[int, int, int]) -> None:
    x = product("fp8_linear_add", sizes, (*pair, "fp32", "fp32", "bf16", "bf16"))
    x.check(x.run(in_place=True))


@pytest.mark.parametrize("layout", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_transposed_operands_give_the_same_product(layout: tuple[bool, bool], out: str) -> None:
    if training_device().sm not in products.ANY_LAYOUT:
        pytest.skip("this GPU multiplies only operands whose summed dimension is contiguous")
    x = product("fp8_linear", (144, 272, 80), (*PLAIN, out), trans_a=layout[0], trans_b=layout[1])
    x.check(x.run())


def test_sums_of_one_sign_are_exact_unless_accumulated_fast() -> None:
    """Short sums lose their last bits one way. On Hopper, a fast sum of 4096 positive terms is 7 % too small."""
    exact, fast = (product("fp8_linear", (256, 256, 4096), (*PLAIN, "fp32"), fast=f, positive=True) for f in (0, 1))
    assert abs(float((exact.run().double() / exact.terms).mean()) - 1) < 2e-3
    if training_device().sm == 90:
        assert -0.2 < float((fast.run().double() / fast.terms).mean()) - 1 < -1e-2


def test_scales_are_read_when_the_product_runs() -> None:
    """A graph that was captured once follows scales that change from step to step."""
    x = product("fp8_linear", (64, 64, 64), (*PLAIN, "fp32"))
    binding = bind_kernel(products.KERNELS, x.op, x.contents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    out, (scale_a, scale_b) = binding.buffers[x.out].tensor, (binding.buffers[v].tensor for v in x.op.ins[2:4])
    graph.replay()
    before = out.clone()
    scale_a[0] *= 4
    scale_b[0] /= 2
    graph.replay()
    assert same_bits(out, 2 * before)


def test_equal_products_share_their_algorithm() -> None:
    """A product that is bound a second time, with other buffers, is bit-identical."""
    x = product("fp8_linear", (2048, 256, 256), ("e5m2", "e4m3", "fp32", "fp32", "fp32"))
    assert same_bits(x.run(), x.run())


def test_the_algorithm_is_timed_for_these_dtypes_and_this_accumulation() -> None:
    names = [
        algorithm(product("fp8_linear", (96, 64, 320), dtypes, fast=fast)).split(" | ")
        for dtypes, fast in (
            ((*PLAIN, "bf16"), False),
            ((*PLAIN, "bf16"), True),
            (("e4m3", "e5m2", *PLAIN[2:], "fp32"), False),
        )
    ]
    assert [name[0].split(" workspace")[0] for name in names] == [
        "96x64x320 nt e4m3->bf16 scaled",
        "96x64x320 nt e4m3->bf16 scaled fast",
        "96x64x320 nt e4m3*e5m2->fp32 scaled",
    ]
    assert all("TFLOP/s" in name[-1] for name in names)


def test_a_refusal_of_cublaslt_names_product_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    if training_device().sm in products.ANY_LAYOUT:
        pytest.skip("this GPU has an algorithm for every layout")
    x = product("fp8_linear", (64, 96, 128), (*PLAIN, "bf16"), trans_a=True)
    monkeypatch.setattr(products, "ANY_LAYOUT", range(1000))
    message = r"refuses fp8_linear of e4m3 \[128, 64\] and e4m3 \[96, 128\] to bf16 .*no algorithm.* recipe: bf16"
    with pytest.raises(ConfigError, match=message):
        bind_kernel(products.KERNELS, x.op, x.contents)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_operands_of_timed_products_are_normal_numbers(dtype: str) -> None:
    """Their deviation is a seventh of the largest number of the dtype; none is NaN or saturated."""
    from surogate_recipes_fp8 import _C

    size = 1_000_003
    out = guarded((size,), TORCH_DTYPES[dtype])
    _C.random_normal(out.pointer, size, DTYPES[dtype].code, torch.cuda.current_stream().cuda_stream)
    out.check()
    numbers = out.tensor.float().double() / (LARGEST[dtype] / 7)
    assert numbers.isfinite().all() and float(numbers.abs().max()) < 6
    assert abs(float(numbers.mean())) < 0.01 and abs(float(numbers.var()) - 1) < 0.02


def test_errors_name_the_invalid_argument() -> None:
    x = product("fp8_linear", (16, 16, 16), (*PLAIN, "bf16"))
    launch, arguments = bind_kernel(products.KERNELS, x.op, x.contents).launches[0].call
    with pytest.raises(ValueError, match="gemm: scale_a is a null pointer"):
        launch(*arguments[:5], 0, *arguments[6:])
    with pytest.raises(ValueError, match="gemm: scale_b must be aligned to 16 bytes"):
        launch(*arguments[:6], arguments[6] + 4, *arguments[7:])
