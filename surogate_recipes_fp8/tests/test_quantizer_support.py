"""Which ops that quantize the kernels support, and the reasons why not. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from gate_forms import FORMS

from surogate_core.api import KernelDef, Op, ProgramError, Target, Value
from surogate_core.testing.binding import refusal
from surogate_core.testing.devices import DEVICES
from surogate_recipes_fp8.kernels import KERNELS
from surogate_recipes_fp8.kernels.quantization import extent
from surogate_recipes_fp8.ops import OPS

DEFINITIONS = {definition.kind: definition for definition in OPS}

TOKENS, COLUMNS = 48, 32


def target(sm: int | None = 90) -> Target:
    return Target(replace(DEVICES["h200"], sm=sm, title=f"a GPU of SM{sm}"))


def values(prefix: str, specs: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Value, ...]:
    return tuple(
        Value(name=f"{prefix}{i}", shape=shape, dtype=dtype, role="act") for i, (shape, dtype) in enumerate(specs)
    )


def quantizing(kind: str, scaling: str, *, rows: int = TOKENS, columns: int = COLUMNS, extra: int = 0) -> Op:
    """Return an op of a kind, with `extra` inputs too many."""
    tokens, wide, row, state = (
        ((rows, columns), "bf16"),
        ((rows, 2 * columns), "bf16"),
        ((columns,), "bf16"),
        ((2,), "fp32"),
    )
    q, q_t, rstd = ((rows, columns), "e4m3"), ((columns, rows), "e4m3"), ((rows,), "fp32")
    weights, order = ((rows // 2, 2), "fp32"), ((rows,), "int32")
    gradient = [((rows, 2 * columns), "e5m2"), ((2 * columns, rows), "e5m2")]
    ins, outs = {
        "fp8_quantize": ([tokens], [q, q_t]),
        "fp8_rmsnorm": ([tokens, row], [q, q_t, rstd]),
        "fp8_add_rmsnorm": ([tokens, tokens, row], [q, q_t, rstd, tokens]),
        **{f"fp8_{gated}": ([wide], [q, q_t]) for gated in ("swiglu", "geglu")},
        **{f"fp8_{gated}_bwd": ([tokens, wide], gradient) for gated in ("swiglu", "geglu")},
        "fp8_weighted_swiglu": ([wide, weights, order], [q]),
        "fp8_weighted_swiglu_bwd": ([tokens, wide, weights, order], [gradient[0], weights]),
        "fp8_rmsnorm_bwd": ([tokens, tokens, row, rstd, tokens], [q, q_t, tokens, ((columns,), "fp32")]),
        "fp8_rmsnorm_dgrad": ([tokens, tokens, row, rstd], [q, q_t, tokens]),
    }[kind]
    states = {"delayed": 2, "given": 1, "current": 0, "fallback": 1}[scaling] + extra
    scale = [state] if scaling in ("current", "fallback") else []
    dtype = "e5m2" if "bwd" in kind or "dgrad" in kind else "e4m3"
    attrs: dict[str, Any] = {"dtype": dtype, "scaling": scaling, "transposed": "weighted" not in kind, "eps": 1e-6}
    attrs["residual"] = kind == "fp8_rmsnorm_bwd"
    attrs = {name: value for name, value in attrs.items() if name in DEFINITIONS[kind].attrs}
    return Op(kind, values("in", [*ins, *[state] * states]), values("out", [*outs, *scale]), attrs)


KINDS = (
    *("fp8_quantize", "fp8_rmsnorm", "fp8_add_rmsnorm", "fp8_swiglu", "fp8_swiglu_bwd"),
    *("fp8_geglu", "fp8_geglu_bwd", "fp8_weighted_swiglu", "fp8_weighted_swiglu_bwd"),
    *("fp8_rmsnorm_bwd", "fp8_rmsnorm_dgrad"),
)


def kernel_of(kind: str) -> KernelDef:
    (kernel,) = [kernel for kernel in KERNELS if kernel.op == kind]
    return kernel


def refused(op: Op, sm: int | None = 90) -> str:
    return refusal(kernel_of(op.kind), DEFINITIONS[op.kind], op, target(sm))


@pytest.mark.parametrize("scaling", ["delayed", "given", "current", "fallback"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_serves_every_scaling(kind: str, scaling: str) -> None:
    op = quantizing(kind, scaling)
    assert refused(op) == ""
    partials = 4 * 3 * COLUMNS if kind == "fp8_rmsnorm_bwd" else 0
    measured = 256 if scaling in ("current", "fallback") else 0
    assert kernel_of(kind).workspace(op, target()) == measured + partials


@pytest.mark.parametrize("kind", KINDS)
def test_reasons_why_an_op_is_not_supported(kind: str) -> None:
    assert refused(quantizing(kind, "given"), 86) == "needs a GPU of SM89 or newer, not a GPU of SM86"
    assert "must be multiples of 16" in refused(quantizing(kind, "given", rows=40))
    assert "must be multiples of 16" in refused(quantizing(kind, "given", columns=24))
    assert refused(quantizing(kind, "current", extra=1)) == ""
    assert "which given scaling does not take" in refused(quantizing(kind, "given", extra=1))
    op = quantizing(kind, "delayed")
    assert "got 'hourly'" in refused(replace(op, attrs={**op.attrs, "scaling": "hourly"}))
    assert "cannot accumulate" in refused(replace(op, accumulate=frozenset({0})))


@pytest.mark.parametrize("kind", ["fp8_weighted_swiglu", "fp8_weighted_swiglu_bwd"])
def test_a_gate_of_experts_has_any_form_but_a_negative_limit(kind: str) -> None:
    op, infer = quantizing(kind, "given"), DEFINITIONS[kind].infer
    for form in FORMS:
        assert refused(replace(op, attrs={**op.attrs, **form})) == ""
    with pytest.raises(ProgramError, match="limit must be positive, or 0 for none, got -1"):
        infer(op.ins, {**op.attrs, "limit": -1.0})


@pytest.mark.parametrize(("size", "extents"), [(256, (16, 16)), (2816, (176, 16)), (4096, (32, 128)), (2**28, None)])
def test_a_part_of_a_matrix_is_quantized_in_rows_of_a_tile(size: int, extents: tuple[int, int] | None) -> None:
    x, scale, q = values("v", [((size,), "bf16"), ((2,), "fp32"), ((size,), "e4m3")])
    assert refused(Op("fp8_quantize", (x, scale), (q,), {"dtype": "e4m3", "scaling": "given"})) == ""
    assert extent(x) == (extents or (size // 128, 128))
    (odd,) = values("odd", [((size + 16,), "bf16")])
    assert "must be multiples of 16" in refused(
        Op("fp8_quantize", (odd, scale), (odd,), {"dtype": "e4m3", "scaling": "given"})
    )


@pytest.mark.parametrize(("kind", "columns"), [("fp8_add_rmsnorm", 32784), ("fp8_rmsnorm_dgrad", 16400)])
def test_norms_have_a_longest_row(kind: str, columns: int) -> None:
    assert f"at most {columns - 16} columns" in refused(quantizing(kind, "given", columns=columns))


def test_states_are_updated_in_place() -> None:
    clip_coef, history, amax, scale = values("v", [((), "fp32"), ((8, 1), "fp32"), ((2,), "fp32"), ((2,), "fp32")])
    ins, attrs = (clip_coef, history, amax, scale), {"maxima": (448.0,)}
    assert refused(Op("fp8_update", ins, (history, scale, amax), attrs)) == ""
    assert "must be updated in place" in refused(Op("fp8_update", ins, (history, amax, scale), attrs))
    assert "needs 1 maxima" in refused(Op("fp8_update", ins, (history, scale, amax), {"maxima": ()}))
    assert refused(Op("fp8_guard", ins[:3], ins[:2], {})) == ""
    assert "must be updated in place" in refused(Op("fp8_guard", ins[:3], (history, clip_coef), {}))
