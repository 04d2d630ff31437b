"""Binding says what is missing, where, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.api import Deterministic, KernelDef, Support, Target
from surogate_core.errors import ConfigError
from surogate_core.memory.devices import DEVICES
from surogate_core.memory.plan import plan_family
from surogate_core.plugins.discovery import load_registry
from surogate_core.program.builder import Builder
from surogate_core.program.op import Op
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.bind import Bound, bind, each_once


def bound(
    kernel: KernelDef | None,
    *,
    allow_reference: bool = False,
    deterministic: Deterministic = "auto",
    notices: list[str] | None = None,
) -> Bound:
    """A program of one addition, bound in CPU memory: addresses are addresses."""
    ops = load_registry().ops
    b = Builder(ops, "fp32")
    with b.record("forward"):
        total = b.apply("add", b.input("a", (4,), "fp32"), b.input("b", (4,), "fp32"))
        program = b.program("sum", (total,))
    memory = plan_family([program], b.declared, lambda op: 64)
    buffers = Buffers(memory)
    target = Target(DEVICES["h200"], deterministic)
    notice = ([] if notices is None else notices).append
    return bind(program, ops, lambda op: kernel, buffers, target, 7, notice, allow_reference=allow_reference)


def kernel(bind: Any) -> KernelDef:
    return KernelDef(op="add", dtypes=("*", "..."), supports=lambda op, target: Support(True), bind=bind)


def test_values_become_addresses_and_the_stream_comes_last() -> None:
    def launch(*arguments: int) -> None:
        raise AssertionError("binding must not launch")

    def bind_add(op: Op, context: Any) -> Any:
        assert context.workspace
        return context.call(launch, *op.ins, *op.outs, 4)

    result = bound(kernel(bind_add))
    (((part,),),) = (result.parts,)
    function, arguments = part.call
    assert part.above == -1
    assert function is launch
    assert len(set(arguments[:3])) == 3
    assert arguments[3:] == (4, 7)
    assert result.capturable


def test_an_op_without_a_kernel_is_an_error_that_names_it_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"add .*test_bind\.py:\d+.*no compiled kernel.*kernels: allow_reference"):
        bound(None)


def test_a_reference_on_a_gpu_is_never_captured() -> None:
    assert not bound(None, allow_reference=True).capturable


def test_a_package_without_compiled_code_says_how_to_get_it() -> None:
    def bind_add(op: Op, context: Any) -> Any:
        raise ImportError("cannot import name '_C'")

    with pytest.raises(ConfigError, match=r"SUROGATE_CUDA=on.*CUDA_VISIBLE_DEVICES="):
        bound(kernel(bind_add))


def test_a_kernel_that_fails_to_bind_is_named() -> None:
    def bind_add(op: Op, context: Any) -> Any:
        raise RuntimeError("no algorithm fits")

    with pytest.raises(ConfigError, match=r"add .*RuntimeError: no algorithm fits"):
        bound(kernel(bind_add))


@pytest.mark.parametrize("deterministic", ["auto", "true", "false"])
def test_a_kernel_sees_whether_bits_must_repeat_and_can_tell_the_user(deterministic: Deterministic) -> None:
    def bind_add(op: Op, context: Any) -> Any:
        context.notice(f"asked for {context.target.deterministic}")
        return context.call(print)

    notices: list[str] = []
    bound(kernel(bind_add), deterministic=deterministic, notices=notices)
    assert notices == [f"asked for {deterministic}"]


def test_a_kernel_that_refuses_is_not_overruled() -> None:
    def bind_add(op: Op, context: Any) -> Any:
        raise ConfigError("deterministic: true cannot be kept by add")

    with pytest.raises(ConfigError, match=r"^deterministic: true cannot be kept by add$"):
        bound(kernel(bind_add), deterministic="true")


def test_a_reference_on_a_gpu_promises_no_bits() -> None:
    notices: list[str] = []
    bound(None, allow_reference=True, notices=notices)
    bound(None, allow_reference=True, deterministic="false", notices=notices)
    assert len(notices) == 1 and "may differ in their last bits" in notices[0]
    with pytest.raises(ConfigError, match=r"add .*deterministic: true.*torch reference.*deterministic: auto"):
        bound(None, allow_reference=True, deterministic="true")


def test_what_many_ops_say_is_told_once() -> None:
    told: list[str] = []
    notice = each_once(told.append)
    for text in ("a", "b", "a"):
        notice(text)
    assert told == ["a", "b"]
