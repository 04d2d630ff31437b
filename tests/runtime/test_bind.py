"""Binding gives launches their addresses and streams, and its errors name the op and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surogate_core.api import Deterministic, KernelDef, Launch, Support, Target
from surogate_core.errors import ConfigError, ProgramError
from surogate_core.machine.devices import DEVICES
from surogate_core.memory.plan import plan_programs
from surogate_core.plugins.discovery import load_registry
from surogate_core.program.builder import Builder
from surogate_core.program.op import Op
from surogate_core.program.shards import part_of
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.bind import BoundProgram, ExecutionContext, bind, each_once
from surogate_core.runtime.comms.single import SingleComm


def bound(
    kernel: KernelDef | None,
    *,
    allow_reference: bool = False,
    deterministic: Deterministic = "auto",
    notices: list[str] | None = None,
    comm: SingleComm | None = None,
    owner: int | None = None,
) -> BoundProgram:
    """Bind a program of one addition to CPU memory, on the stream 7; with `comm` on the lane of its collectives.

    With an `owner`, that of two ranks alone has the sum.
    """
    ops = load_registry().ops
    b = Builder(ops, "fp32")
    with b.record("forward"):
        total = b.apply("add", b.input("a", (4,), "fp32"), b.input("b", (4,), "fp32"))
        program = b.program("sum", (total,))
    if owner is not None:
        of_owner = {total: part_of(total, 2, owner)}
        program = replace(program, ops=tuple(op.on(of_owner) for op in program.ops), outputs=(of_owner[total],))
    if comm is not None:
        program = replace(program, ops=tuple(replace(op, lane="comm") for op in program.ops))
    memory = plan_programs([program], b.declared, lambda op: 64)
    buffers = Buffers(memory)
    context = ExecutionContext(
        ops=ops,
        kernel_for=lambda op: kernel,
        target=Target(DEVICES["h200"], deterministic),
        notice=([] if notices is None else notices).append,
        allow_reference=allow_reference,
        comm=comm or SingleComm(),
    )
    return bind(program, buffers, context, {"compute": 7, "comm": 8})


def kernel(bind: Any) -> KernelDef:
    return KernelDef(op="add", dtypes=("*", "..."), supports=lambda op, target: Support(True), bind=bind)


def test_values_become_addresses_and_the_stream_is_the_last_argument() -> None:
    def launch(*arguments: int) -> None:
        raise AssertionError("binding must not launch")

    def bind_add(op: Op, context: Any) -> Any:
        assert context.workspace
        return context.call(launch, *op.ins, *op.outs, 4)

    result = bound(kernel(bind_add))
    ((bound_launch,),) = result.launches
    function, arguments = bound_launch.call
    assert bound_launch.labels_above == -1
    assert function is launch
    assert len(set(arguments[:3])) == 3
    assert arguments[3:] == (4, 7)
    assert result.capturable


@pytest.mark.parametrize("reference", [False, True])
def test_an_op_of_another_rank_is_bound_but_not_launched(reference: bool) -> None:
    """So all ranks select the algorithms of the same products."""
    ranks: list[int] = []

    def bind_add(op: Op, context: Any) -> Any:
        ranks.append(context.comm.rank)
        return context.call(print, *op.ins, *op.outs)

    served = None if reference else kernel(bind_add)
    found = [bound(served, owner=owner, allow_reference=reference) for owner in (0, 1)]
    assert [len(launches) for one in found for launches in one.launches] == [1, 0]
    assert ranks == ([] if reference else [0, 0])
    assert found[0].capturable == found[1].capturable == (not reference)


def test_the_error_for_an_op_without_a_kernel_names_op_and_remedy() -> None:
    with pytest.raises(ConfigError, match=r"add .*test_bind\.py:\d+.*no compiled kernel.*kernels: allow_reference"):
        bound(None)


def test_a_program_with_a_reference_is_not_capturable() -> None:
    assert not bound(None, allow_reference=True).capturable


@pytest.mark.parametrize("capturable", [True, False])
def test_a_program_with_a_collective_is_capturable_if_the_communicator_is(capturable: bool) -> None:
    comm = SingleComm(capturable=capturable)
    assert bound(kernel(lambda op, context: context.call(print)), comm=comm).capturable == capturable


def test_a_collective_that_depends_on_the_labels_of_a_batch_is_refused() -> None:
    def bind_add(op: Op, context: Any) -> Any:
        return (Launch(context.call(print)), Launch(context.call(print), labels_above=128))

    with pytest.raises(ProgramError, match=r"add .*a collective must not depend on the labels of a batch"):
        bound(kernel(bind_add), comm=SingleComm())


def test_the_error_for_a_package_without_compiled_code_says_how_to_install_it() -> None:
    def bind_add(op: Op, context: Any) -> Any:
        raise ImportError("cannot import name '_C'")

    with pytest.raises(ConfigError, match=r"SUROGATE_CUDA=on.*CUDA_VISIBLE_DEVICES="):
        bound(kernel(bind_add))


def test_the_error_for_a_kernel_that_fails_to_bind_names_the_op() -> None:
    def bind_add(op: Op, context: Any) -> Any:
        raise RuntimeError("no algorithm fits")

    with pytest.raises(ConfigError, match=r"add .*RuntimeError: no algorithm fits"):
        bound(kernel(bind_add))


@pytest.mark.parametrize("deterministic", ["auto", "true", "false"])
def test_a_kernel_gets_the_key_deterministic_and_can_give_a_notice(deterministic: Deterministic) -> None:
    def bind_add(op: Op, context: Any) -> Any:
        context.notice(f"asked for {context.target.deterministic}")
        return context.call(print)

    notices: list[str] = []
    bound(kernel(bind_add), deterministic=deterministic, notices=notices)
    assert notices == [f"asked for {deterministic}"]


def test_a_config_error_of_a_kernel_is_passed_on_unchanged() -> None:
    def bind_add(op: Op, context: Any) -> Any:
        raise ConfigError("deterministic: true cannot be kept by add")

    with pytest.raises(ConfigError, match=r"^deterministic: true cannot be kept by add$"):
        bound(kernel(bind_add), deterministic="true")


def test_a_reference_on_a_gpu_is_not_deterministic() -> None:
    notices: list[str] = []
    bound(None, allow_reference=True, notices=notices)
    bound(None, allow_reference=True, deterministic="false", notices=notices)
    assert len(notices) == 1 and "may differ in their last bits" in notices[0]
    with pytest.raises(ConfigError, match=r"add .*deterministic: true.*torch reference.*deterministic: auto"):
        bound(None, allow_reference=True, deterministic="true")


def test_equal_notices_are_shown_once() -> None:
    shown: list[str] = []
    notice = each_once(shown.append)
    for text in ("a", "b", "a"):
        notice(text)
    assert shown == ["a", "b"]
