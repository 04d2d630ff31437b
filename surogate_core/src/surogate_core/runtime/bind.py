"""Turns ops into launches: every op of a program becomes a function and its arguments, once, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..api import Call, Comm, KernelDef, Launch, OpDef, Target
from ..errors import ConfigError, ProgramError, SurogateError
from ..program.op import Op, Program
from ..program.value import Value
from .arena import Buffers
from .launch import SingleComm
from .reference import place, reference_call

KernelFor = Callable[[Op], KernelDef | None]
"""Which kernel serves an op; None: its torch reference."""

UseAutotuneCache = Callable[[str, Callable[[Mapping[str, str]], None], Callable[[], Mapping[str, str]]], None]
"""`BindContext.autotune_cache`."""


def keep_nothing(name: str, recall: Callable[[Mapping[str, str]], None], tell: Callable[[], Mapping[str, str]]) -> None:
    """For runs that neither know of earlier ones nor leave anything to later ones."""


@dataclass
class Binding:
    """A `BindContext`: the buffers of one program, one op at a time."""

    target: Target
    stream: int
    buffers: Buffers
    program: str
    notice: Callable[[str], None]
    autotune_cache: UseAutotuneCache
    index: int = 0
    tables: list[Tensor] = field(default_factory=list)
    comm: Comm = field(default_factory=SingleComm)

    def pointer(self, value: Value) -> int:
        """Device address of the value's planned place."""
        return self.buffers.view(value, self.program).data_ptr()

    @property
    def workspace(self) -> int:
        """Device address of the op's scratch, 0 without any."""
        return self.buffers.scratch(self.program, self.index)[0]

    def call(self, launch: Callable[..., None], *arguments: Any) -> Call:
        """`launch` with pointers for values, and the stream last."""
        return launch, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        """Device address of an int64 array that lives as long as the binding."""
        unsigned = torch.tensor([w - (1 << 64) if w >= 1 << 63 else w for w in words], dtype=torch.int64)
        self.tables.append(unsigned.to(self.buffers.device))
        return self.tables[-1].data_ptr()


@dataclass(frozen=True)
class Bound:
    """A program as launches: the parts of each op, in the order of `ops`.

    tables: device memory that the arguments point to. capturable: fit for CUDA graphs.
    """

    parts: tuple[tuple[Launch, ...], ...]
    ops: tuple[Op, ...]
    tables: tuple[Tensor, ...]
    capturable: bool


def bind(
    program: Program,
    ops: Mapping[str, OpDef],
    kernel_for: KernelFor,
    buffers: Buffers,
    target: Target,
    stream: int,
    notice: Callable[[str], None],
    autotune_cache: UseAutotuneCache = keep_nothing,
    *,
    allow_reference: bool,
    comm: Comm | None = None,
    comm_stream: int = 0,
) -> Bound:
    """Bind every op of `program`, those of the lane "comm" to `comm_stream`.

    `notice` is called with what kernels have to tell the user, again and again. Raises ConfigError when an op has no
    kernel and references are not allowed, or none does what `target` asks for.
    """
    context = Binding(target, stream, buffers, program.name, notice, autotune_cache, comm=comm or SingleComm())
    parts: list[tuple[Launch, ...]] = []
    capturable = True
    for index, op in enumerate(program.ops):
        context.index = index
        context.stream = stream if op.lane == "compute" else comm_stream
        kernel = kernel_for(op)
        if kernel is not None:
            capturable = capturable and kernel.capturable
            parts.append(_bind_kernel(kernel, op, context))
        elif allow_reference:
            capturable = False
            parts.append((Launch(_bind_reference(op, ops, context)),))
        else:
            raise ConfigError(
                f"{place(op)}: no compiled kernel serves it on {target.device.title}. Install the package that has "
                "one, or set kernels: allow_reference (slow)."
            )
    return Bound(tuple(parts), program.ops, tuple(context.tables), capturable)


def _bind_kernel(kernel: KernelDef, op: Op, context: Binding) -> tuple[Launch, ...]:
    try:
        return as_parts(kernel.bind(op, context))
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


def as_parts(bound: Call | tuple[Launch, ...]) -> tuple[Launch, ...]:
    """What a kernel's `bind` returned, as parts: a launch is one that is always needed. Raises TypeError for anything
    else."""
    if isinstance(bound, tuple) and all(isinstance(part, Launch) for part in bound):
        calls: tuple[Launch, ...] = bound  # type: ignore[assignment]
    else:
        calls = (Launch(bound),)  # type: ignore[arg-type]
    for call in (part.call for part in calls):
        if not (isinstance(call, tuple) and len(call) == 2 and callable(call[0]) and isinstance(call[1], tuple)):
            raise TypeError(f"returned {bound!r:.80}, expected (function, arguments) or a tuple of Launch")
    return calls


def _bind_reference(op: Op, ops: Mapping[str, OpDef], context: Binding) -> Call:
    if context.target.deterministic == "true":
        raise ConfigError(
            f"{place(op)}: deterministic: true, but on a GPU torch does not promise the same bits from run to run, and "
            "this op runs as its torch reference. Install the package that has a compiled kernel, or set "
            "deterministic: auto."
        )
    if context.target.deterministic == "auto":
        context.notice(
            "deterministic: auto: results may differ in their last bits from run to run, since some ops run as torch "
            "references on a GPU (kernels: allow_reference)."
        )
    call = reference_call(op, ops, context.buffers, context.program)
    device = context.buffers.device

    def launch() -> None:
        with torch.device(device):
            call.run()

    return launch, ()


def each_once(notice: Callable[[str], None]) -> Callable[[str], None]:
    """`notice`, called with a text the first time only."""
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            notice(text)

    return tell
