"""Products by cuBLASLt against fp64, through their kernels' own binding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Call, Deterministic, Op, Target, Value
from surogate_core.program.value import DTYPE_CODES
from surogate_core.runtime.device import training_device
from surogate_core.testing.kernels import Guarded, assert_close, eager_and_graph, guarded, guarded_copy, same_bits
from surogate_recipes_bf16.kernels import gemm

pytestmark = pytest.mark.gpu

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Context:
    """A bind context over guarded buffers."""

    buffers: dict[Value, Guarded]
    scratch: Guarded
    target: Target

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def pointer(self, value: Value) -> int:
        return self.buffers[value].pointer

    @property
    def workspace(self) -> int:
        return self.scratch.pointer

    def call(self, launch: Any, *arguments: Any) -> Call:
        return launch, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        raise NotImplementedError

    def notice(self, text: str) -> None:
        raise AssertionError(text)


@dataclass
class Product:
    """A bound op, its buffers, and its result in fp64."""

    op: Op
    context: Context
    call: Call
    truth: Tensor
    magnitude: Tensor
    length: int

    def run(self, initial: Tensor | None = None) -> Tensor:
        """Eager and captured, from an output full of NaN or `initial`: binding has left rubbish in it."""
        launch, arguments = self.call
        out = self.context.buffers[self.op.outs[0]]
        out.tensor.view(torch.uint8).fill_(0xFF) if initial is None else out.tensor.copy_(initial)
        buffers = list(self.context.buffers.values())
        eager_and_graph(lambda stream: launch(*arguments[:-1], stream), buffers)
        self.context.scratch.check()
        return out.tensor


def bound(
    kind: str,
    t: int,
    n: int,
    k: int,
    dtypes: Sequence[str],
    *,
    accumulate: bool = False,
    deterministic: Deterministic = "auto",
) -> Product:
    """`kind` on fresh random inputs; dtypes of (ins..., out) as a KernelDef lists them."""
    shapes = {
        "linear": [(t, k), (n, k), (n,)],
        "linear_dgrad": [(t, n), (n, k)],
        "linear_wgrad": [(t, n), (t, k)],
    }[kind][: len(dtypes) - 1]
    out_shape = {"linear": (t, n), "linear_dgrad": (t, k), "linear_wgrad": (n, k)}[kind]
    ins = [guarded_copy(torch.randn(s, device="cuda").to(TORCH[d])) for s, d in zip(shapes, dtypes, strict=False)]
    out = guarded(out_shape, TORCH[dtypes[-1]])
    values = [Value(name="in", shape=s, dtype=d, role="act") for s, d in zip(shapes, dtypes, strict=False)]
    result = Value(name="out", shape=out_shape, dtype=dtypes[-1], role="act")
    op = Op(kind, tuple(values), (result,), {}, accumulate=frozenset({0} if accumulate else ()))
    (kernel,) = [x for x in gemm.KERNELS if x.op == kind and x.dtypes == tuple(dtypes)]
    target = Target(training_device(), deterministic)
    assert kernel.supports(op, target).ok
    scratch = guarded((kernel.workspace(op, target),), torch.uint8)
    context = Context({**dict(zip(values, ins, strict=True)), result: out}, scratch, target)
    call = kernel.bind(op, context)
    truth, magnitude = _truth(kind, ins)
    return Product(op, context, call, truth, magnitude, {"linear": k, "linear_dgrad": n, "linear_wgrad": t}[kind])


# Tensor cores add the products of one step exactly and truncate the running sum: at most `length` roundings, though not
# of random sign as assert_close takes them to be. The running sum is far below the sum of magnitudes that the tolerance
# is made of.


def _truth(kind: str, ins: Sequence[Guarded]) -> tuple[Tensor, Tensor]:
    """The result, and the sum of the magnitudes of its terms."""

    def of(tensors: Sequence[Tensor]) -> Tensor:
        a, b = tensors[0], tensors[1]
        if kind == "linear":
            return a @ b.T + (tensors[2] if len(tensors) == 3 else 0)
        return a @ b if kind == "linear_dgrad" else a.T @ b

    wide = [x.tensor.double() for x in ins]
    return of(wide), of([x.abs() for x in wide])


KINDS = ("linear", "linear_dgrad", "linear_wgrad")
SIGNATURES = [(kernel.op, kernel.dtypes) for kernel in gemm.KERNELS]


@pytest.mark.parametrize(("kind", "dtypes"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("shape", [(64, 96, 128), (7, 13, 5), (1, 8, 16), (129, 255, 257)], ids=str)
def test_product_matches_fp64(kind: str, dtypes: Sequence[str], shape: tuple[int, int, int]) -> None:
    product = bound(kind, *shape, dtypes)
    out = product.run()
    assert_close(out, product.truth, out.dtype, product.length, product.magnitude)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "shape", [(4096, 4096, 1024), (4096, 1024, 3072), (16384, 1024, 1024), (2048, 12288, 4096)], ids=str
)
def test_product_of_a_training_step_matches_fp64(kind: str, out: str, shape: tuple[int, int, int]) -> None:
    product = bound(kind, *shape, ("bf16", "bf16", out))
    result = product.run()
    assert_close(result, product.truth, result.dtype, product.length, product.magnitude)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(64, 96, 128), (7, 13, 5), (4096, 1024, 2048)], ids=str)
def test_accumulating_product_adds_to_what_is_there(kind: str, dtype: str, shape: tuple[int, int, int]) -> None:
    product = bound(kind, *shape, (dtype, dtype, "fp32"), accumulate=True)
    initial = torch.randn_like(product.truth, dtype=torch.float32) * 8
    out = product.run(initial)
    magnitude = product.magnitude + initial.double().abs()
    assert_close(out, product.truth + initial.double(), torch.float32, product.length, magnitude)


def test_fp32_product_is_not_rounded_to_tf32() -> None:
    """TF32 keeps 10 bits of an operand: 1 + 2^-12 would become 1."""
    product = bound("linear", 128, 128, 256, ("fp32", "fp32", "fp32"))
    for value in product.op.ins:
        product.context.buffers[value].tensor.fill_(1 + 2.0**-12)
    launch, arguments = product.call
    launch(*arguments)
    out = product.context.buffers[product.op.outs[0]].tensor
    expected = torch.full_like(product.truth, 256 * (1 + 2.0**-12) ** 2)
    assert_close(out, expected, torch.float32, 256)


def test_equal_shapes_share_their_algorithm() -> None:
    first = bound("linear_wgrad", 2048, 256, 256, ("bf16", "bf16", "fp32"))
    second = bound("linear_wgrad", 2048, 256, 256, ("bf16", "bf16", "fp32"))
    for mine, other in zip(first.op.ins, second.op.ins, strict=True):
        second.context.buffers[other].tensor.copy_(first.context.buffers[mine].tensor)
        second.context.buffers[other] = guarded_again(second.context.buffers[other])
    assert same_bits(first.run(), second.run())


def guarded_again(buffer: Guarded) -> Guarded:
    """The same buffer, now an input with its present contents."""
    return Guarded(buffer.tensor, buffer.before, buffer.after, buffer.tensor.clone())


def test_where_bits_must_repeat_no_clock_chooses() -> None:
    def product(deterministic: Deterministic) -> Product:
        return bound("linear_dgrad", 96, 64, 448, ("bf16", "bf16", "bf16"), deterministic=deterministic)

    def described(product: Product) -> str:
        text: str = product.call[0].__self__.describe()
        return text

    timed, first, again = product("auto"), product("true"), product("true")
    assert "TFLOP/s" in described(timed) and "TFLOP/s" not in described(first)
    assert described(again) == described(first)
    assert "TFLOP/s" in described(product("auto"))
    assert_close(first.run(), first.truth, torch.bfloat16, first.length, float(first.magnitude.max()))


def test_exported_algorithm_is_used_after_import() -> None:
    from surogate_recipes_bf16 import _C

    before = bound("linear", 96, 64, 320, ("bf16", "bf16", "bf16"))
    described = before.call[0].__self__.describe()
    choices = [c for c in _C.gemm_export() if described.startswith(c[0])]
    assert len(choices) == 1
    _C.gemm_import(choices)
    after = bound("linear", 96, 64, 320, ("bf16", "bf16", "bf16"))
    again = after.call[0].__self__.describe()
    assert again.endswith("imported")
    assert again.split(" | ")[:3] == described.split(" | ")[:3]
    with pytest.raises(ValueError, match="not an algorithm"):
        _C.gemm_import([("x", "y")])


@pytest.mark.parametrize(("kind", "dtypes"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_planned_workspace_is_what_the_product_needs(kind: str, dtypes: Sequence[str]) -> None:
    from surogate_recipes_bf16 import _C

    op = bound(kind, 7, 130, 12, dtypes).op
    target, shape = Target(training_device()), gemm.product(op)
    bias = DTYPE_CODES[op.ins[2].dtype] if len(op.ins) == 3 else gemm.NO_BIAS
    a, out = DTYPE_CODES[op.ins[0].dtype], DTYPE_CODES[op.outs[0].dtype]
    needed = _C.gemm_workspace_bytes(shape.m, shape.n, shape.k, a, out, bias, gemm.library_bytes(target))
    (kernel,) = [x for x in gemm.KERNELS if x.op == kind and x.dtypes == tuple(dtypes)]
    assert kernel.workspace(op, target) == needed


def test_wrong_argument_is_named() -> None:
    launch, arguments = bound("linear", 8, 8, 8, ("bf16", "bf16", "bf16")).call
    with pytest.raises(ValueError, match="gemm: d is a null pointer"):
        launch(*arguments[:2], 0, *arguments[3:])
    with pytest.raises(ValueError, match="gemm: a must be aligned"):
        launch(arguments[0] + 2, *arguments[1:])
