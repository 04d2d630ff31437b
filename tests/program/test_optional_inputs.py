"""Inputs that an op may lack: only kernels that name them get an op that has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surogate_core.api import KernelDef, Support, Target
from surogate_core.assembly.resolve import resolve, unserved_ops
from surogate_core.errors import ProgramError
from surogate_core.machine.devices import DEVICES
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import refusal
from surogate_core.program.builder import Builder
from surogate_core.program.op import Op
from surogate_core.program.value import Value
from surogate_core.testing.ops import check_optional_inputs

REGISTRY = load_registry()
KERNELS = [item.definition for item in REGISTRY.provided if item.kind == "kernel"]
TARGET = Target(DEVICES["h200"])
HEADS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "seq_len": 128}


def backward(*more: Value, dtype: str = "bf16") -> Op:
    """Return an `attention_bwd` of 128 tokens, with these inputs behind those that it must have."""
    dout, out = (Value(name, (128, 256), dtype, "act") for name in ("dout", "out"))
    qkv, dqkv = (Value(name, (128, 512), dtype, "act") for name in ("qkv", "dqkv"))
    lse, cu_seqlens = Value("lse", (4, 128), "fp32", "act"), Value("cu_seqlens", (3,), "int32", "input")
    return Op("attention_bwd", (dout, qkv, out, lse, cu_seqlens, *more), (dqkv,), HEADS)


DLSE = Value("dlse", (4, 128), "fp32", "act")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.op)
def test_a_kernel_that_serves_any_inputs_does_not_get_one_that_it_does_not_name(kernel: KernelDef) -> None:
    """An optional input that the op gets later changes nothing for ops without it."""
    later = replace(REGISTRY.ops[kernel.op], optional={"planted": 2}, attrs={})
    served = replace(kernel, dtypes=("*", "..."), attrs=(), supports=lambda op, target: Support(True))
    value = Value("x", (8, 8), "bf16", "act")
    without, having = (Op(kernel.op, (value,) * count, (), {}) for count in (2, 3))
    assert refusal(served, later, without, TARGET) == ""
    assert refusal(served, later, having, TARGET) == "does not take planted"
    assert refusal(replace(served, takes=("planted",)), later, having, TARGET) == ""


@pytest.mark.parametrize("kind", sorted(REGISTRY.ops))
def test_the_optional_inputs_of_an_op_are_those_of_its_reference(kind: str) -> None:
    check_optional_inputs(REGISTRY.ops[kind])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_gradient_of_lse_goes_to_a_kernel_that_takes_it(dtype: str) -> None:
    for more, taken in ((), ()), ((DLSE,), ("dlse",)):
        found = REGISTRY.kernel_for(backward(*more, dtype=dtype), TARGET, "bf16")
        assert found.kernel is not None and found.kernel.takes == taken


def test_an_input_that_no_kernel_takes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY.ops, "attention", replace(REGISTRY.ops["attention"], optional={"planted": 2}))
    _, qkv, out, lse, cu_seqlens = backward().ins
    op = Op("attention", (qkv, cu_seqlens, DLSE), (out, lse), HEADS)
    found = unserved_ops(resolve([op], lambda op: REGISTRY.kernel_for(op, TARGET, "bf16"), TARGET, REGISTRY.ops))
    assert "  attention: surogate-recipe-bf16: does not take planted" in found


def test_a_bias_of_a_product_is_taken_by_every_kernel_as_before() -> None:
    assert not REGISTRY.ops["linear"].optional
    x, w, y = (Value(name, (64, 64), "bf16", "act") for name in ("x", "w", "y"))
    found = REGISTRY.kernel_for(Op("linear", (x, w, Value("bias", (64,), "bf16", "param")), (y,), {}), TARGET, "bf16")
    assert found.kernel is not None and found.kernel.takes == ()


def test_a_gradient_of_lse_of_another_shape_is_no_input() -> None:
    b = Builder(REGISTRY.ops, "bf16")
    wrong = Value("dlse", (128, 4), "fp32", "act")
    with pytest.raises(ProgramError, match=r"dlse must have the shape of lse, \[4, 128\]"):
        b.emit("attention_bwd", *backward(wrong).ins, **HEADS)
    with pytest.raises(ProgramError, match="the last may be dlse"):
        b.emit("attention_bwd", *backward(DLSE, DLSE).ins, **HEADS)
