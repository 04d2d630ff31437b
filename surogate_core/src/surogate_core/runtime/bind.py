"""Binding: turns each op of a program into launches, once, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..api import Call, Comm, KernelDef, Launch, Op, OpDef, Target
from ..errors import ConfigError, ProgramError, SurogateError
from ..program.op import Lane, Program
from ..program.value import Value
from .arena import Buffers
from .comms.single import SingleComm
from .reference import place, reference_call

KernelFor = Callable[[Op], KernelDef | None]
"""Return the kernel that serves an op, or None if its torch reference is to be used."""

UseAutotuneCache = Callable[[str, Callable[[Mapping[str, str]], None], Callable[[], Mapping[str, str]]], None]
"""The signature of `BindContext.autotune_cache`: (name, load, dump)."""


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """Everything but the programs, their buffers and their streams.

    ops             op definitions by kind
    kernel_for      selects the kernel of each op
    target          device and determinism that kernels are selected and bound for
    notice          called with lines for the user; may get the same line several times
    autotune_cache  what `BindContext.autotune_cache` calls; by default kernels are timed again in every run
    comm            the communicator of this rank; its `device` is the GPU to run on
    allow_reference whether an op without a kernel may run its torch reference
    """

    ops: Mapping[str, OpDef]
    kernel_for: KernelFor
    target: Target
    notice: Callable[[str], None]
    autotune_cache: UseAutotuneCache = lambda name, load, dump: None
    comm: Comm = field(default_factory=SingleComm)
    allow_reference: bool = False


@dataclass(frozen=True)
class BoundProgram:
    """A program as launches.

    launches    of each op, in the order of `ops`
    tables      device memory that the arguments point to
    capturable  whether the launches may be captured as CUDA graphs
    """

    ops: tuple[Op, ...]
    launches: tuple[tuple[Launch, ...], ...]
    tables: tuple[Tensor, ...]
    capturable: bool


def bind(program: Program, buffers: Buffers, context: ExecutionContext, streams: Mapping[Lane, int]) -> BoundProgram:
    """Bind every op of `program` to the stream of its lane. One that another rank owns has no launches.

    It is bound all the same, so that all ranks select the algorithms of products from the same list.

    Raises ConfigError if an op has no kernel and references are not allowed, or if its kernel cannot be as
    deterministic as the target requires.
    """
    launches: list[tuple[Launch, ...]] = []
    tables: list[Tensor] = []
    capturable = True
    for index, op in enumerate(program.ops):
        kernel = context.kernel_for(op)
        if kernel is not None:
            bound = _bind_kernel(kernel, op, Binding(context, buffers, program, index, streams, tables))
            launches.append(bound if op.owner in (None, context.comm.rank) else ())
            if op.lane == "comm":
                capturable &= context.comm.capturable
                if any(launch.labels_above >= 0 for launch in launches[-1]):  # the other ranks would wait for ever
                    text = f"{place(op)}: a collective must not depend on the labels of a batch, but has labels_above"
                    error = ProgramError(text)
                    raise error if kernel.origin is None else kernel.origin.failed(f"bind, {place(op)}", error)
        elif context.allow_reference:
            capturable = False
            call = _bind_reference(op, context, buffers, program)
            launches.append((Launch(call),) if op.owner in (None, context.comm.rank) else ())
        else:
            raise ConfigError(
                f"{place(op)}: no compiled kernel serves it on {context.target.device.title}. Install the package "
                "that has one, or set kernels: allow_reference (slow)."
            )
    return BoundProgram(program.ops, tuple(launches), tuple(tables), capturable)


@dataclass(frozen=True)
class Binding:
    """The `BindContext` of the op at `index` of `program`."""

    context: ExecutionContext
    buffers: Buffers
    program: Program
    index: int
    streams: Mapping[Lane, int]
    tables: list[Tensor]

    @property
    def target(self) -> Target:
        return self.context.target

    @property
    def comm(self) -> Comm:
        return self.context.comm

    @property
    def stream(self) -> int:
        return self.streams[self.program.ops[self.index].lane]

    @property
    def workspace(self) -> int:
        return self.buffers.scratch(self.program.name, self.index)[0]

    def pointer(self, value: Value) -> int:
        return self.buffers.address(value, self.program.name)

    def call(self, function: Callable[..., None], *arguments: Any) -> Call:
        return function, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        signed = torch.tensor([w - (1 << 64) if w >= 1 << 63 else w for w in words], dtype=torch.int64)
        self.tables.append(signed.to(self.buffers.device))
        return self.tables[-1].data_ptr()

    def notice(self, text: str) -> None:
        self.context.notice(text)

    def autotune_cache(
        self, name: str, load: Callable[[Mapping[str, str]], None], dump: Callable[[], Mapping[str, str]]
    ) -> None:
        self.context.autotune_cache(name, load, dump)


def _bind_kernel(kernel: KernelDef, op: Op, binding: Binding) -> tuple[Launch, ...]:
    try:
        return as_launches(kernel.bind(op, binding))
    except ProgramError as error:
        if kernel.origin is None:
            raise
        raise kernel.origin.failed(f"bind, {place(op)}", error) from error
    except SurogateError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{place(op)}: the package of its kernel was installed without compiled code ({error}). Install it again "
            "with SUROGATE_CUDA=on, which needs nvcc, or train on the CPU with CUDA_VISIBLE_DEVICES= (empty)."
        ) from error
    except Exception as error:
        if kernel.origin is None:
            raise ConfigError(f"{place(op)}: its kernel cannot be bound: {type(error).__name__}: {error}") from error
        raise kernel.origin.failed(f"bind, {place(op)}", error) from error


def as_launches(bound: Call | tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Return what a kernel's `bind` returned as launches. A call becomes a launch that every batch needs.

    Raises TypeError for anything else.
    """
    if isinstance(bound, tuple) and all(isinstance(launch, Launch) for launch in bound):
        launches: tuple[Launch, ...] = bound  # type: ignore[assignment]
    else:
        launches = (Launch(bound),)  # type: ignore[arg-type]
    for call in (launch.call for launch in launches):
        if not (isinstance(call, tuple) and len(call) == 2 and callable(call[0]) and isinstance(call[1], tuple)):
            raise TypeError(f"returned {bound!r:.80}, expected (function, arguments) or a tuple of Launch")
    return launches


def _bind_reference(op: Op, context: ExecutionContext, buffers: Buffers, program: Program) -> Call:
    if context.target.deterministic == "true":
        raise ConfigError(
            f"{place(op)}: deterministic: true cannot be kept, because this op runs as its torch reference, and on a "
            "GPU torch does not promise the same bits from run to run. Install the package that has a compiled kernel, "
            "or set deterministic: auto."
        )
    if context.target.deterministic == "auto":
        context.notice(
            "deterministic: auto: results may differ in their last bits from run to run, because some ops run as torch "
            "references on the GPU (kernels: allow_reference)."
        )
    reference = reference_call(op, context.ops, buffers, program.name)

    def call() -> None:
        with torch.device(buffers.device):
            reference.run()

    return call, ()


def each_once(notice: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes each different text on to `notice` once."""
    seen: set[str] = set()

    def once(text: str) -> None:
        if text not in seen:
            seen.add(text)
            notice(text)

    return once
