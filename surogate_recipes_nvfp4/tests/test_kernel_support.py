"""Which NVFP4 ops the kernels serve on which GPU, and the reasons why not. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from surogate_core.api import BindContext, KernelDef, Op, Target, Value
from surogate_core.testing.binding import refusal
from surogate_core.testing.devices import DEVICES
from surogate_recipes_nvfp4.formats import scales_shape
from surogate_recipes_nvfp4.kernels import KERNELS, products
from surogate_recipes_nvfp4.ops import OPS

DEFINITIONS = {definition.kind: definition for definition in OPS}
AMPERE, HOPPER, BLACKWELL, BLACKWELL_RTX = 80, 90, 100, 120


def target(sm: int | None) -> Target:
    return Target(replace(DEVICES["h200"], sm=sm, title=f"a GPU of SM{sm}"))


def value(name: str, shape: tuple[int, ...], dtype: str) -> Value:
    return Value(name=name, shape=shape, dtype=dtype, role="act")


def form(name: str, rows: int, columns: int) -> list[Value]:
    dtypes = ("e2m1", "ue4m3", "fp32")
    shapes = ((rows, columns), scales_shape(rows, columns), (2,))
    return [value(f"{name}{i}", shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]


def op_of(kind: str, ins: list[Value], accumulate: bool = False, **attrs: Any) -> Op:
    specs = DEFINITIONS[kind].infer(ins, attrs)
    outs = tuple(value(f"out{i}", spec.shape, spec.dtype) for i, spec in enumerate(specs))
    return Op(kind, tuple(ins), outs, attrs, accumulate=frozenset({0} if accumulate else ()))


def quantizing(rows: int = 48, columns: int = 80, **attrs: Any) -> Op:
    random = [value("micro_step", (), "int32"), value("seed", (), "int64")] if attrs.get("stochastic") else []
    return op_of("nvfp4_quantize", [value("x", (rows, columns), "bf16"), *random], rows=True, columns=True, **attrs)


def product(kind: str = "nvfp4_linear", *rest: Value, k: int = 96, out: str = "bf16", **attrs: Any) -> Op:
    trans_b = attrs.get("trans_b", False)
    b = form("b", k, 32) if trans_b else form("b", 32, k)
    return op_of(kind, [*form("a", 48, k), *b, *rest], **{"dtype": out, "backend": "emulate", **attrs})


ROWS = (128, 256, 32)


def stored(kind: str = "nvfp4_linear", *rest: Value, rows: tuple[int, ...] = ROWS, **attrs: Any) -> Op:
    n = sum(rows)
    weight = [value("codes", (n, 48), "uint8"), value("scales", (n, 6), "e4m3"), value("f", (len(rows),), "fp32")]
    given = {"dtype": "bf16", "backend": "emulate", "stored": rows, **attrs}
    return op_of(kind, [*form("a", 48, 96), *weight, *rest], **given)


BASE, BIAS = value("base", (48, 32), "bf16"), value("bias", (32,), "bf16")


def serving(op: Op, sm: int | None) -> KernelDef | None:
    return next((k for k in KERNELS if k.op == op.kind and not refusal(k, DEFINITIONS[op.kind], op, target(sm))), None)


def refused(op: Op, sm: int | None = HOPPER) -> str:
    """Return the reason of the kernel with the dtypes of the op."""
    reasons = [refusal(k, DEFINITIONS[op.kind], op, target(sm)) for k in KERNELS if k.op == op.kind]
    return next(reason for reason in reasons if not reason.startswith("supports dtypes"))


@pytest.mark.parametrize("sm", [AMPERE, HOPPER, BLACKWELL, BLACKWELL_RTX])
@pytest.mark.parametrize(
    "op",
    [
        quantizing(),
        quantizing(square=True, four_over_six=True),
        quantizing(hadamard=True, stochastic=True, stream=6),
        product(),
        product(out="fp32", accumulate=True),
        product("nvfp4_linear", BIAS),
        product("nvfp4_linear_add", BASE, trans_b=True),
        stored(),
        stored("nvfp4_linear_add", value("base", (48, 416), "bf16")),
        op_of("nvfp4_swiglu", [value("gate_up", (48, 160), "bf16")]),
        op_of("nvfp4_swiglu_bwd", [value("dy", (48, 80), "bf16"), value("gate_up", (48, 160), "bf16")]),
    ],
    ids=lambda op: f"{op.kind} {len(op.ins)}",
)
def test_quantizer_and_emulated_products_run_on_ampere_and_later(op: Op, sm: int) -> None:
    assert serving(op, sm) is not None
    assert "needs a GPU of SM80" in refused(op, 75) or "need a GPU of SM80" in refused(op, 75)


def test_products_in_fp4_need_blackwell() -> None:
    op = product(backend="cublaslt")
    assert serving(op, BLACKWELL) and serving(op, BLACKWELL_RTX)
    assert refused(op) == "FP4 products need a GPU of SM100 or newer, not a GPU of SM90"
    assert "a multiple of 32 elements" in refused(product(k=80, backend="cublaslt"), BLACKWELL)
    assert serving(product(k=80), BLACKWELL)


def test_emulated_products_add_a_bias_in_the_dtype_of_the_output() -> None:
    """As cuBLASLt does of bf16 factors; of FP4 it adds a bf16 bias to fp32 too."""
    assert "add a bias to bf16 outputs only" in refused(product("nvfp4_linear", BIAS, out="fp32"))
    assert serving(product("nvfp4_linear", BIAS, out="fp32", backend="cublaslt"), BLACKWELL)


def test_only_fp32_outputs_without_an_addend_are_accumulated_into() -> None:
    assert "accumulates only into fp32 outputs" in refused(product(accumulate=True))
    assert "accumulates only into fp32 outputs" in refused(product("nvfp4_linear_add", BASE, accumulate=True))
    assert "cannot accumulate" in refused(replace(quantizing(), accumulate=frozenset({0})))


def test_matrices_of_a_stored_weight_begin_with_atoms_of_scales() -> None:
    assert serving(stored(backend="cublaslt"), BLACKWELL) and not serving(stored(backend="cublaslt"), HOPPER)
    assert "need a multiple of 128 rows, got (128, 96, 192)" in refused(stored(rows=(128, 96, 192)))
    assert "cannot accumulate" in refused(stored(dtype="fp32", accumulate=True))


def test_scales_of_a_stored_weight_are_ordered_in_the_workspace_for_tensor_cores_alone() -> None:
    fp4, emulated = stored(backend="cublaslt"), stored()
    kernels = serving(fp4, BLACKWELL), serving(emulated, HOPPER)
    assert kernels[0] and kernels[1]
    assert kernels[0].workspace(fp4, target(HOPPER)) == (64 << 20) + 256 + 4 * 2 * 512
    assert kernels[1].workspace(emulated, target(HOPPER)) == (64 << 20) + 256 + 2 * 48 * 96 + 2 * 416 * 96
    assert "input gradients are products in bf16" in kernels[1].notice(emulated, target(HOPPER))


class Addresses:
    """The part of a `BindContext` that says where buffers are: far apart, and the workspace at 2^40."""

    workspace, target = 1 << 40, target(BLACKWELL)

    def pointer(self, value: Value) -> int:
        return (1 + sum(value.name.encode())) << 20


@pytest.mark.parametrize("backend", ["emulate", "cublaslt"])
def test_the_matrices_of_a_stored_weight_have_adjacent_parts_of_all_buffers(backend: str) -> None:
    op = stored("nvfp4_linear", value("bias", (416,), "bf16"), backend=backend)
    at, parts = Addresses(), list(products._parts(op, cast(BindContext, Addresses())))
    kernel = serving(op, BLACKWELL)
    assert kernel and [part.columns for part in parts] == list(ROWS) and {part.stride for part in parts} == {416}
    element = 2 if backend == "emulate" else 0.5
    scales = 0 if backend == "emulate" else 2 * 4  # bytes of a row: K / 16 to a multiple of 4
    for part, following, rows in zip(parts, parts[1:], ROWS, strict=False):
        assert following.d - part.d == following.bias - part.bias == 2 * rows
        assert following.b - part.b == element * rows * 96 and following.scale_b - part.scale_b == scales * rows
        assert following.factors - part.factors == 16 and following.a == part.a
        assert all(address % 256 == 0 for address in (following.a, following.b, following.d))
    first, last = parts[0], parts[-1]
    assert (first.d, first.bias) == (at.pointer(op.outs[0]), at.pointer(op.ins[6]))
    end = at.workspace + kernel.workspace(op, at.target)
    assert end == (last.b + 2 * 32 * 96 if backend == "emulate" else last.scale_b + scales * 128)


def test_the_workspace_of_an_emulated_product_holds_both_factors_in_bf16() -> None:
    op, hopper = product(), target(HOPPER)
    kernel = serving(op, HOPPER)
    fp4 = serving(product(backend="cublaslt"), BLACKWELL)
    assert kernel and fp4
    factors = fp4.workspace(product(backend="cublaslt"), hopper)
    assert kernel.workspace(op, hopper) - factors == 2 * 48 * 96 + 2 * 32 * 96
    assert factors == (64 << 20) + 256


@pytest.mark.parametrize(
    ("backend", "sm", "told"),
    [
        ("emulate", HOPPER, "products of FP4 operands are computed in bf16: a GPU of SM90 does not multiply FP4."),
        ("emulate", BLACKWELL, "products of FP4 operands are computed in bf16."),
        ("cublaslt", BLACKWELL, "not tried on such a GPU yet. Run surogate verify before you train."),
    ],
)
def test_a_plan_tells_what_multiplies(backend: str, sm: int, told: str) -> None:
    op = product(backend=backend)
    kernel = serving(op, sm)
    assert kernel is not None and kernel.notice(op, target(sm)) == f"fp4_backend: {backend}: {told}"
