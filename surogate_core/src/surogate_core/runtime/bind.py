"""Turns ops into launches: every op of a program becomes a function and its arguments, once, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..api import Call, Comm, DeviceInfo, KernelDef, OpDef
from ..errors import ConfigError, SurogateError
from ..program.op import Op, Program
from ..program.value import Value
from ..reference.ops import load
from .arena import Buffers
from .launch import Alone
from .reference import place, run_reference

KernelFor = Callable[[Op], KernelDef | None]
"""Which kernel serves an op; None: its torch reference."""


@dataclass
class Binding:
    """A `BindContext`: the buffers of one program, one op at a time."""

    device: DeviceInfo
    stream: int
    buffers: Buffers
    program: str
    index: int = 0
    tables: list[Tensor] = field(default_factory=list)
    comm: Comm = field(default_factory=Alone)

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
    """A program as launches. tables: device memory that the arguments point to. capturable: fit for a CUDA graph."""

    calls: tuple[Call, ...]
    ops: tuple[Op, ...]
    tables: tuple[Tensor, ...]
    capturable: bool


def bind(
    program: Program,
    ops: Mapping[str, OpDef],
    kernel_for: KernelFor,
    buffers: Buffers,
    device: DeviceInfo,
    stream: int,
    *,
    allow_reference: bool,
    comm: Comm | None = None,
    comm_stream: int = 0,
) -> Bound:
    """Bind every op of `program`, those of the lane "comm" to `comm_stream`.

    Raises ConfigError when an op has no kernel and references are not allowed.
    """
    context = Binding(device, stream, buffers, program.name, comm=comm or Alone())
    calls: list[Call] = []
    capturable = True
    for index, op in enumerate(program.ops):
        context.index = index
        context.stream = stream if op.lane == "compute" else comm_stream
        kernel = kernel_for(op)
        if kernel is not None:
            capturable = capturable and kernel.capturable
            calls.append(_bind_kernel(kernel, op, context))
        elif allow_reference:
            capturable = False
            calls.append(_bind_reference(op, ops, context))
        else:
            raise ConfigError(
                f"{place(op)}: no compiled kernel serves it on {device.title}. Install the package that has one, "
                "or set kernels: allow_reference (slow)."
            )
    return Bound(tuple(calls), program.ops, tuple(context.tables), capturable)


def _bind_kernel(kernel: KernelDef, op: Op, context: Binding) -> Call:
    try:
        return kernel.bind(op, context)
    except SurogateError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{place(op)}: the package of its kernel was installed without compiled code ({error}). Install it again "
            "with SUROGATE_CUDA=on, which needs nvcc, or train on the CPU with CUDA_VISIBLE_DEVICES= (empty)."
        ) from error
    except Exception as error:
        raise ConfigError(f"{place(op)}: its kernel cannot be bound: {type(error).__name__}: {error}") from error


def _bind_reference(op: Op, ops: Mapping[str, OpDef], context: Binding) -> Call:
    function = load(ops[op.kind].reference)
    ins = tuple(context.buffers.view(v, context.program) for v in op.ins)
    outs = tuple(context.buffers.view(v, context.program) for v in op.outs)
    device = context.buffers.device

    def launch() -> None:
        with torch.device(device):
            run_reference(op, function, ins, outs)

    return launch, ()
