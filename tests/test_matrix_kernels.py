"""Kernels of stored matrices: what a format's functions are called with."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from surogate_core.api import Op, OutSpec, Target, Value
from surogate_core.api.matrix_kernels import reading_kernels
from surogate_core.api.matrix_storage import MAX_RUNS, MatrixStorage
from surogate_core.dtypes import DTYPES
from surogate_core.machine.devices import device

HALVES = MatrixStorage(
    kind="halves",
    title="halves",
    reference="acme.reference",
    states=lambda shape, attrs: [OutSpec("codes", shape, "uint8"), OutSpec("scales", shape[:1], "fp32")],
    read=lambda stored, attrs: (stored[0].shape, attrs),
    attrs=lambda info, options: {},
)
"""A format with two states."""

CODES, SCALES, AMAX = (
    Value(name=name, shape=shape, dtype=dtype, role="param")
    for name, shape, dtype in (("codes", (48, 32), "uint8"), ("scales", (48,), "fp32"), ("amax", (2, 2), "fp32"))
)
KERNELS = {
    kernel.op: kernel
    for kernel in reading_kernels(
        HALVES, "acme._C", lambda op: (op.attrs["rows"], 32), stored=lambda values, ctx: (*values, ctx.table([7]))
    )
}
KINDS = [definition.kind for definition in HALVES.ops if definition.kind != "halves_quantize"]


def op_of(kind: str, **attrs: Any) -> Op:
    definition = next(definition for definition in HALVES.ops if definition.kind == kind)
    ins = (CODES, SCALES, AMAX) if kind == "halves_to_e4m3" else (CODES, SCALES)
    attrs = {"rows": (16, 32), "dtype": "bf16", **attrs}
    specs = definition.infer(ins, attrs)
    outs = tuple(Value(name=f"out{i}", shape=s.shape, dtype=s.dtype, role="act") for i, s in enumerate(specs))
    return Op(kind, ins, outs, attrs)


def test_a_format_has_a_kernel_for_each_op_that_reads_what_it_stores() -> None:
    assert list(KERNELS) == KINDS
    assert {kernel.module for kernel in KERNELS.values()} == {"acme._C"}


@pytest.mark.parametrize(
    ("kind", "attrs", "arguments"),
    [
        ("halves_dequantize", {}, ["codes", "scales", "table", "out0"]),
        ("halves_amax", {}, ["codes", "scales", "table", "out0"]),
        ("halves_to_e4m3", {"transposed": True}, ["codes", "scales", "table", "amax", "out0", "out1", True]),
        ("halves_to_e4m3", {"transposed": False}, ["codes", "scales", "table", "amax", "out0", "out1", False]),
    ],
)
def test_the_function_of_an_op_gets_stored_values_outputs_shape_and_dtype(
    kind: str, attrs: dict[str, Any], arguments: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("acme._C")
    monkeypatch.setitem(sys.modules, "acme", ModuleType("acme"))
    monkeypatch.setitem(sys.modules, "acme._C", module)
    for name in KINDS:
        setattr(module, name, name)
    context = SimpleNamespace(
        table=lambda words: "table",
        call=lambda function, *given: (function, [v.name if isinstance(v, Value) else v for v in given]),
    )
    bound = KERNELS[kind].bind(op_of(kind, **attrs), context)  # type: ignore[arg-type]
    assert bound == (kind, [*arguments, (16, 32), 32, DTYPES["bf16"].code])


def test_runs_of_equal_matrices_are_limited_and_matrices_are_not() -> None:
    op = op_of("halves_amax")
    target = Target(device("h100"), "auto")
    for rows in ((16, 32), (16,) * 2048, tuple(range(1, MAX_RUNS + 1))):
        op.attrs["rows"] = rows  # type: ignore[index]
        assert KERNELS["halves_amax"].supports(op, target).ok
    op.attrs["rows"] = (1, 2) * (MAX_RUNS // 2) + (1,)  # type: ignore[index]
    reason = KERNELS["halves_amax"].supports(op, target).reason
    assert reason == f"{MAX_RUNS + 1} runs of matrices of equal height are fused, at most {MAX_RUNS} can be"
