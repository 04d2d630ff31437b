"""Attributes of ops: declared by the op, checked wherever an op comes to be, implemented by the kernel that runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surogate_core.api import KernelDef, OpDef, Support, Target
from surogate_core.errors import ProgramError
from surogate_core.machine.devices import DEVICES
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import refusal
from surogate_core.program.builder import Builder
from surogate_core.program.op import Op
from surogate_core.program.value import Value
from surogate_core.program.verify import verify
from surogate_core.testing.ops import check_declared_attrs

REGISTRY = load_registry()
KINDS = sorted(REGISTRY.ops)
KERNELS = [item.definition for item in REGISTRY.provided if item.kind == "kernel"]
VALUES: dict[type, Any] = {int: 4, float: 0.5, str: "bf16", bool: True, tuple: (), dict: {}}


def required(definition: OpDef) -> dict[str, Any]:
    """Return a value of its type for each attribute that an op must have."""
    return {name: VALUES.get(of) for name, of in definition.attrs.items() if not isinstance(of, tuple)}


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_has_no_attribute_that_its_definition_does_not_declare(kind: str) -> None:
    b = Builder(REGISTRY.ops, "bf16")
    with pytest.raises(ProgramError, match=r"test_attrs\.py:\d+: .*attribute planted=16 is unknown") as error:
        b.emit(kind, **required(REGISTRY.ops[kind]), planted=16)
    assert kind in str(error.value)
    assert all(name in str(error.value) for name in REGISTRY.ops[kind].attrs)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if required(REGISTRY.ops[kind])])
def test_an_op_has_every_attribute_without_a_default(kind: str) -> None:
    for name in required(REGISTRY.ops[kind]):
        attrs = {key: value for key, value in required(REGISTRY.ops[kind]).items() if key != name}
        with pytest.raises(ProgramError, match=f"attribute {name} is missing"):
            Builder(REGISTRY.ops, "bf16").emit(kind, **attrs)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if REGISTRY.ops[kind].attrs])
def test_an_attribute_has_the_declared_type(kind: str) -> None:
    for name in REGISTRY.ops[kind].attrs:
        with pytest.raises(ProgramError, match=f"attribute {name}=<object .* has the wrong type"):
            Builder(REGISTRY.ops, "bf16").emit(kind, **{**required(REGISTRY.ops[kind]), name: object()})


def test_a_bool_is_no_number_and_a_whole_number_is_a_float() -> None:
    definition = replace(REGISTRY.ops["rmsnorm"], attrs={"eps": float, "n": (int, 1)})
    definition.check_attrs({"eps": 1})
    for attrs in ({"eps": True}, {"eps": 1.0, "n": True}, {"eps": 1.0, "n": 1.5}, {"eps": 1.0, "n": None}):
        with pytest.raises(ProgramError, match="has the wrong type"):
            definition.check_attrs(attrs)


def test_a_pass_that_adds_an_unknown_attribute_fails_the_check_of_its_program() -> None:
    b = Builder(REGISTRY.ops, "fp32")
    with b.record("forward"):
        b.emit("swiglu", b.input("x", (4, 8), "fp32"))
        program = b.program("forward")
    changed = replace(program, ops=(replace(program.ops[0], attrs={"act": "gelu"}),))
    with pytest.raises(ProgramError, match="attribute act='gelu' is unknown"):
        verify(changed, REGISTRY.ops, "a pass")


@pytest.mark.parametrize("kind", KINDS)
def test_the_attributes_of_an_op_are_the_keywords_of_its_reference(kind: str) -> None:
    check_declared_attrs(REGISTRY.ops[kind])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.op)
def test_no_kernel_serves_an_attribute_that_it_does_not_name(kernel: KernelDef) -> None:
    """An attribute that the op gets later, with a default, changes nothing for ops without it."""
    definition = REGISTRY.ops[kernel.op]
    assert all(isinstance(definition.attrs[name], tuple) for name in kernel.attrs)
    later = replace(definition, attrs={**definition.attrs, "planted": (int | None, None)})
    served = replace(kernel, dtypes=("*", "..."), supports=lambda op, target: Support(True))
    value, target = Value("x", (8, 8), "bf16", "act"), Target(DEVICES["h200"])

    def printed(**attrs: Any) -> str:
        return refusal(served, later, Op(kernel.op, (value,), (), attrs), target)

    assert printed() == printed(planted=None) == printed(**required(definition)) == ""
    assert printed(planted=16) == "does not implement planted=16"
    for name, of in definition.attrs.items():
        if isinstance(of, tuple) and name not in kernel.attrs and isinstance(of[1], (int, float)):
            assert printed(**{name: of[1] + 1}) == f"does not implement {name}={of[1] + 1}"
