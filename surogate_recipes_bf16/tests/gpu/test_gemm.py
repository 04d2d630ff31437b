"""Matrix products by cuBLASLt, bound through their KernelDefs and compared with fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES, Deterministic, Op, Value
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import UNIT, assert_close, guarded, same_bits
from surogate_recipes_bf16.kernels import gemm

pytestmark = pytest.mark.gpu

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Product:
    """A product op with the contents of its operands and its result in fp64.

    `length` is the number of terms of a sum, `magnitude` the sum of their absolute values.
    """

    op: Op
    contents: dict[Value, Tensor]
    truth: Tensor
    magnitude: Tensor
    length: int

    def run(self, initial: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """Bind the op, run it eagerly and captured, and return the output. It initially contains `initial` or NaN.

        `in_place`: the output has the place of the last input.
        """
        given = {} if initial is None else {self.op.outs[0]: initial}
        op = replace(self.op, outs=self.op.ins[-1:]) if in_place else self.op
        (out,) = run_kernel(gemm.KERNELS, op, self.contents | given)
        return out.cuda()


def product(kind: str, t: int, n: int, k: int, dtypes: Sequence[str], *, accumulate: bool = False) -> Product:
    """Return a product of `kind` with random inputs. `dtypes` are those of (ins..., out), as in a KernelDef."""
    plain, base = kind.removesuffix("_add"), kind.endswith("_add")
    out_shape = {"linear": (t, n), "linear_dgrad": (t, k), "linear_wgrad": (n, k)}[plain]
    operands = {
        "linear": [(t, k), (n, k), (n,)],
        "linear_dgrad": [(t, n), (n, k)],
        "linear_wgrad": [(t, n), (t, k)],
    }[plain][: len(dtypes) - 1 - base]
    shapes = [*operands, *([out_shape] if base else [])]
    ins = tuple(
        Value(name=f"in{i}", shape=s, dtype=d, role="act")
        for i, (s, d) in enumerate(zip(shapes, dtypes[:-1], strict=True))
    )
    out = Value(name="out", shape=out_shape, dtype=dtypes[-1], role="act")
    op = Op(kind, ins, (out,), {}, accumulate=frozenset({0} if accumulate else ()))
    contents = {v: torch.randn(v.shape, device="cuda").to(TORCH[v.dtype]) for v in ins}
    truth, magnitude = _truth(kind, list(contents.values()))
    length = {"linear": k, "linear_dgrad": n, "linear_wgrad": t}[plain]
    if base:  # the product may be rounded before the sum; in units of what assert_close allows for a magnitude
        rounding = UNIT[TORCH[dtypes[-1]]] * (truth - contents[ins[-1]].double()).abs()
        magnitude = magnitude + rounding / (4 * (1 + length**0.5) * 2.0**-24)
    return Product(op, contents, truth, magnitude, length)


def algorithm(op: Op, contents: dict[Value, Tensor], deterministic: Deterministic = "auto") -> str:
    """Bind the op and return its description: shape, selected algorithm and its origin."""
    (bound,) = bind_kernel(gemm.KERNELS, op, contents, deterministic=deterministic).launches
    return str(bound.call[0].__self__.describe())


# Tensor cores add the products of one step exactly and truncate the running sum. That is at most `length` roundings,
# but not of random sign as assert_close assumes. This is compensated, because the running sum is much smaller than the
# sum of magnitudes in the tolerance.


def _truth(kind: str, ins: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the result and the sum of the magnitudes of its terms."""

    def of(tensors: Sequence[Tensor]) -> Tensor:
        a, b, *added = tensors  # bias and base
        plain = kind.removesuffix("_add")
        product = a @ b.T if plain == "linear" else a @ b if plain == "linear_dgrad" else a.T @ b
        return sum(added, product)

    wide = [x.double() for x in ins]
    return of(wide), of([x.abs() for x in wide])


KINDS = ("linear", "linear_dgrad", "linear_wgrad")
SIGNATURES = [(kernel.op, kernel.dtypes) for kernel in gemm.KERNELS]


@pytest.mark.parametrize(("kind", "dtypes"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("shape", cases([(7, 13, 5), (129, 255, 257)], more=[(64, 96, 128), (1, 8, 16)]), ids=str)
def test_product_matches_fp64(kind: str, dtypes: Sequence[str], shape: tuple[int, int, int]) -> None:
    x = product(kind, *shape, dtypes)
    out = x.run()
    assert_close(out, x.truth, out.dtype, x.length, x.magnitude)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "shape", [(4096, 4096, 1024), (4096, 1024, 3072), (16384, 1024, 1024), (2048, 12288, 4096)], ids=str
)
def test_product_of_a_training_step_matches_fp64(kind: str, out: str, shape: tuple[int, int, int]) -> None:
    x = product(kind, *shape, ("bf16", "bf16", out))
    result = x.run()
    assert_close(result, x.truth, result.dtype, x.length, x.magnitude)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", cases([(7, 13, 5)], more=[(64, 96, 128), (4096, 1024, 2048)]), ids=str)
def test_accumulating_product_adds_to_its_output(kind: str, dtype: str, shape: tuple[int, int, int]) -> None:
    x = product(kind, *shape, (dtype, dtype, "fp32"), accumulate=True)
    initial = torch.randn_like(x.truth, dtype=torch.float32) * 8
    out = x.run(initial)
    assert_close(out, x.truth + initial.double(), torch.float32, x.length, x.magnitude + initial.double().abs())


ADDING = [signature for signature in SIGNATURES if signature[0].endswith("_add")]


@pytest.mark.parametrize(("kind", "dtypes"), ADDING, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("shape", cases([(7, 13, 5), (129, 255, 257)], more=[(64, 96, 128), (4096, 512, 48)]), ids=str)
def test_product_may_take_the_place_of_what_it_adds_to(
    kind: str, dtypes: Sequence[str], shape: tuple[int, int, int]
) -> None:
    x = product(kind, *shape, dtypes)
    out = x.run(in_place=True)
    assert_close(out, x.truth, out.dtype, x.length, x.magnitude)


def test_fp32_product_is_not_rounded_to_tf32() -> None:
    """TF32 has 10 mantissa bits, so 1 + 2^-12 would become 1."""
    x = product("linear", 128, 128, 256, ("fp32", "fp32", "fp32"))
    for tensor in x.contents.values():
        tensor.fill_(1 + 2.0**-12)
    expected = torch.full_like(x.truth, 256 * (1 + 2.0**-12) ** 2)
    assert_close(x.run(), expected, torch.float32, 256)


def test_equal_shapes_share_their_algorithm() -> None:
    """A product that is bound a second time, with other buffers, is bit-identical."""
    x = product("linear_wgrad", 2048, 256, 256, ("bf16", "bf16", "fp32"))
    assert same_bits(x.run(), x.run())


def test_with_deterministic_true_algorithms_are_not_timed() -> None:
    x = product("linear_dgrad", 96, 64, 448, ("bf16", "bf16", "bf16"))
    timed, first, again = (algorithm(x.op, x.contents, d) for d in ("auto", "true", "true"))
    assert "TFLOP/s" in timed and "TFLOP/s" not in first
    assert again == first
    assert algorithm(x.op, x.contents).split(" | ")[:3] == timed.split(" | ")[:3]
    (out,) = run_kernel(gemm.KERNELS, x.op, x.contents, deterministic="true")
    assert_close(out.cuda(), x.truth, torch.bfloat16, x.length, float(x.magnitude.max()))


def test_exported_algorithm_is_used_after_import() -> None:
    from surogate_recipes_bf16 import _C

    x = product("linear", 96, 64, 320, ("bf16", "bf16", "bf16"))
    before = algorithm(x.op, x.contents)
    choices = [c for c in _C.gemm_export() if before.startswith(c[0])]
    assert len(choices) == 1
    _C.gemm_import(choices)
    after = algorithm(x.op, x.contents)
    assert after.endswith("imported")
    assert after.split(" | ")[:3] == before.split(" | ")[:3]
    with pytest.raises(ValueError, match="not an algorithm"):
        _C.gemm_import([("x", "y")])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [1, 13, 1_000_003])
def test_operands_of_timed_products_are_normal_numbers(dtype: str, size: int) -> None:
    """The mean of n numbers deviates by 1 / sqrt(n), their variance by sqrt(2 / n); five times that is allowed."""
    from surogate_recipes_bf16 import _C

    out = guarded((size,), TORCH[dtype])
    _C.random_normal(out.pointer, size, DTYPES[dtype].code, torch.cuda.current_stream().cuda_stream)
    out.check()
    numbers = out.tensor.double()
    assert numbers.isfinite().all()
    assert abs(float(numbers.mean())) < 5 / size**0.5
    if size > 1000:
        assert abs(float(numbers.var()) - 1) < 5 * (2 / size) ** 0.5
        assert numbers.unique().numel() > 1000


def test_errors_name_the_invalid_argument() -> None:
    x = product("linear", 8, 8, 8, ("bf16", "bf16", "bf16"))
    binding = bind_kernel(gemm.KERNELS, x.op, x.contents)
    launch, arguments = binding.launches[0].call
    with pytest.raises(ValueError, match="gemm: d is a null pointer"):
        launch(*arguments[:3], 0, *arguments[4:])
    with pytest.raises(ValueError, match="gemm: c must be aligned"):
        launch(*arguments[:2], arguments[3] + 2, *arguments[3:])
    with pytest.raises(ValueError, match="gemm: a must be aligned"):
        launch(arguments[0] + 2, *arguments[1:])


@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("shape", cases([(64, 96, 128)], more=[(512, 1024, 256)]), ids=str)
def test_products_of_a_batch_have_the_bits_of_any_other_batch_and_are_scaled(
    shape: tuple[int, int, int], trans_a: bool, trans_b: bool
) -> None:
    """alpha a b + beta c matches fp64 within a unit of bf16, and the error of a sum of k terms in fp32."""
    m, n, k = shape
    alpha, beta = 0.75, -2.5
    a, b, c = (torch.randn(5, *s, device="cuda").bfloat16() for s in ((m, k), (k, n), (m, n)))
    stored = (a.mT.contiguous() if trans_a else a, b.mT.contiguous() if trans_b else b, c)
    whole = batched(*stored, shape, trans_a, trans_b, alpha, beta)
    truth = alpha * a.double() @ b.double() + beta * c.double()
    magnitude = alpha * a.double().abs() @ b.double().abs() + abs(beta) * c.double().abs()
    assert_close(whole, truth, torch.bfloat16, k, magnitude)
    for part in (slice(0, 1), slice(1, 3)):
        some = batched(*(x[part].clone() for x in stored), shape, trans_a, trans_b, alpha, beta)
        assert same_bits(some, whole[part])


def batched(
    a: Tensor, b: Tensor, c: Tensor, shape: tuple[int, int, int], trans_a: bool, trans_b: bool, *factors: float
) -> Tensor:
    """Return alpha a b + beta c of each matrix of a batch."""
    from surogate_recipes_bf16 import _C

    (m, n, k), bf16, stream = shape, DTYPES["bf16"].code, torch.cuda.current_stream().cuda_stream
    operands = [guarded(x.shape, torch.bfloat16) for x in (a, b, c, c)]
    scratch = guarded((32 << 20,), torch.uint8)
    addresses = [x.pointer for x in operands]
    gemm = _C.Gemm(
        *(*addresses, 0, 0, 0, scratch.pointer),
        **{"m": m, "n": n, "k": k, "trans_a": trans_a, "trans_b": trans_b},
        **{"dtype_a": bf16, "dtype_b": bf16, "dtype_d": bf16},
        accumulate=True,
        batch=len(a),
        library_bytes=32 << 20,
        stream=stream,
    )
    assert " batched " in gemm.describe()
    for operand, x in zip(operands, (a, b, c), strict=False):
        operand.tensor.copy_(x)
    operands[3].poison()
    gemm.run_scaled(*addresses, scratch.pointer, *factors, stream)
    torch.cuda.synchronize()
    for operand in (*operands, scratch):
        operand.check()
    return operands[3].tensor


class Scaled:
    """alpha a b^T, plus beta d if it accumulates, of bf16 operands, with factors from the host or device memory."""

    LIBRARY = 32 << 20

    def __init__(self, shape: tuple[int, int, int], d_dtype: torch.dtype, *, device: bool, accumulate: bool) -> None:
        from surogate_recipes_bf16 import _C

        m, n, k = shape
        self.accumulate = accumulate
        self.a, self.b = (guarded((rows, k), torch.bfloat16) for rows in (m, n))
        self.d, self.factors = guarded((m, n), d_dtype), guarded((2,), torch.float32)
        self.scratch = guarded((self.LIBRARY,), torch.uint8)
        self.stream = torch.cuda.current_stream().cuda_stream
        bf16 = DTYPES["bf16"].code
        self.gemm = _C.Gemm(
            *(*self.addresses, 0, 0, 0, self.scratch.pointer),
            **{"m": m, "n": n, "k": k, "trans_b": True, "dtype_a": bf16, "dtype_b": bf16},
            dtype_d=DTYPES["fp32" if d_dtype == torch.float32 else "bf16"].code,
            accumulate=accumulate,
            factors=self.factors.pointer if device else 0,
            library_bytes=self.LIBRARY,
            stream=self.stream,
        )
        for buffer in (self.a, self.b, self.d, self.factors, self.scratch):
            buffer.check()

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        d = self.d.pointer
        return self.a.pointer, self.b.pointer, d if self.accumulate else 0, d

    @property
    def key(self) -> str:
        """The description under which the algorithm is exported."""
        return str(self.gemm.describe().split(" | algorithm")[0])

    def fill(self, a: Tensor, b: Tensor, d: Tensor) -> None:
        for buffer, x in ((self.a, a), (self.b, b), (self.d, d)):
            buffer.tensor.copy_(x)

    def from_host(self, alpha: float, beta: float) -> Tensor:
        self.gemm.run_scaled(*self.addresses, self.scratch.pointer, alpha, beta, self.stream)
        return self._result()

    def from_device(self, alpha: float, beta: float) -> Tensor:
        self.factors.tensor.copy_(torch.tensor((alpha, beta)))
        self.launch(self.stream)
        return self._result()

    def launch(self, stream: int) -> None:
        self.gemm.run_with_factors(*self.addresses, 0, 0, 0, self.factors.pointer, self.scratch.pointer, stream)

    def _result(self) -> Tensor:
        torch.cuda.synchronize()
        for buffer in (self.a, self.b, self.d, self.factors, self.scratch):
            buffer.check()
        return self.d.tensor.clone()


@pytest.mark.parametrize("d_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("shape", cases([(136, 264, 272)], more=[(1024, 512, 4096)]), ids=str)
def test_factors_in_device_memory_give_the_bits_of_those_of_the_host(
    shape: tuple[int, int, int], beta: float, d_dtype: torch.dtype
) -> None:
    """But for one rounding where d is added to: cuBLASLt does not say in which precision it scales and adds d."""
    from surogate_recipes_bf16 import _C

    host = Scaled(shape, d_dtype, device=False, accumulate=beta != 0)
    key = Scaled(shape, d_dtype, device=True, accumulate=beta != 0).key
    assert key == host.key.replace(" workspace", " device factors workspace")
    algorithm = dict(_C.gemm_export())[host.key]
    _C.gemm_import([(key, algorithm)])  # otherwise it may be another one, and add in another order
    device = Scaled(shape, d_dtype, device=True, accumulate=beta != 0)
    m, n, k = shape
    a, b, d = (
        torch.randn(*size, device="cuda").to(dtype)
        for size, dtype in (((m, k), torch.bfloat16), ((n, k), torch.bfloat16), ((m, n), d_dtype))
    )
    for alpha in (1.0, 2.2103e-6, -0.7):
        initial = d * alpha if beta else torch.full_like(d, torch.nan)
        for x in (host, device):
            x.fill(a, b, initial)
        out, expected = device.from_device(alpha, beta), host.from_host(alpha, beta)
        assert out.isfinite().all()
        if beta:
            eps = torch.finfo(d_dtype).eps
            torch.testing.assert_close(out, expected, rtol=2 * eps, atol=2 * eps * float(initial.abs().max()))
        else:
            assert same_bits(out, expected)


def test_a_captured_product_reads_factors_when_it_is_replayed() -> None:
    x = Scaled((64, 64, 64), torch.float32, device=True, accumulate=True)
    x.fill(*(torch.randint(-8, 9, (64, 64)) for _ in range(2)), torch.zeros(64, 64))  # sums are exact in any order
    once = x.from_device(1.0, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.launch(torch.cuda.current_stream().cuda_stream)
    for alpha, beta, times in ((4.0, 0.0, 4), (2.0, 0.5, 4), (-1.0, 0.0, -1), (1.0, -1.0, 2)):
        x.factors.tensor.copy_(torch.tensor((alpha, beta)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x.d.tensor, times * once)


def test_factors_must_be_given_if_they_are_read_from_device_memory() -> None:
    x = Scaled((16, 16, 16), torch.float32, device=True, accumulate=False)
    with pytest.raises(ValueError, match="gemm: factors is a null pointer"):
        x.from_host(1.0, 0.0)
    with pytest.raises(ValueError, match="gemm: factors must be aligned to 16 bytes"):
        x.gemm.run_with_factors(*x.addresses, 0, 0, 0, x.factors.pointer + 4, x.scratch.pointer, x.stream)
