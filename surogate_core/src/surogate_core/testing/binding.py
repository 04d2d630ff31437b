"""Tests of a kernel on a GPU by its KernelDef: selected, bound, launched and checked as in a run.

x, y = Value(name="x", ...), Value(name="y", ...)
(out,) = run_kernel(KERNELS, Op("silu", (x,), (y,)), {x: torch.randn(5, 64)})
(out,) = run_op(KERNELS, SILU, [torch.randn(5, 64)], {})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..api import BindContext, Call, Comm, Deterministic, KernelDef, Launch, Op, OpDef, Target, Value
from ..plugins.discovery import load_registry
from ..plugins.registry import refusal
from ..reference.rounding import TORCH_DTYPES
from ..runtime.bind import as_launches
from ..runtime.comms.single import SingleComm
from ..runtime.device import training_device
from .kernels import Guarded, eager_and_graph, guarded, guarded_copy
from .ops import Elements, as_inputs

__all__ = ["Binding", "bind_kernel", "check_reads_attrs", "choose", "refusal", "run_kernel", "run_op"]


@dataclass
class Binding:
    """An op bound to guarded buffers: first the `BindContext` of its kernel, then its launches."""

    buffers: Mapping[Value, Guarded]
    scratch: Guarded | None
    target: Target
    stream: int = 0
    tables: list[Tensor] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    launches: tuple[Launch, ...] = ()
    comm: Comm = field(default_factory=SingleComm)

    def pointer(self, value: Value) -> int:
        return self.buffers[value].pointer

    @property
    def workspace(self) -> int:
        return self.scratch.pointer if self.scratch else 0

    def call(self, function: Callable[..., None], *arguments: Any) -> Call:
        return function, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        self.tables.append(torch.tensor(words, dtype=torch.int64, device="cuda"))
        return self.tables[-1].data_ptr()

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def autotune_cache(self, name: str, load: Callable[..., None], dump: Callable[..., Any]) -> None:
        """Cache nothing: tests neither use nor change the cache of runs."""

    def launch(self, stream: int, labels: int | None = None) -> None:
        """Enqueue the op on `stream`, instead of the one that it was bound to.

        With `labels`, skip the launches that a batch with this number of labels does not need.
        """
        for launch in self.launches:
            if labels is None or labels > launch.labels_above:
                function, arguments = launch.call
                function(*arguments[:-1], stream)

    @property
    def workspaces(self) -> list[Guarded]:
        """The workspace, if the op has one."""
        return [self.scratch] if self.scratch else []

    @property
    def everything(self) -> list[Guarded]:
        """All buffers, including the workspace."""
        return [*self.buffers.values(), *self.workspaces]


def choose(kernels: Sequence[KernelDef], op: Op, target: Target) -> KernelDef:
    """Return the first kernel that serves `op`. Raises AssertionError with the reason of each kernel if none does."""
    definition = load_registry().ops[op.kind]
    reasons = [(kernel, refusal(kernel, definition, op, target)) for kernel in kernels if kernel.op == op.kind]
    for kernel, reason in reasons:
        if not reason:
            return kernel
    raise AssertionError(f"no kernel serves {op.kind}: {'; '.join(reason for _, reason in reasons)}")


class _Read(dict[str, Any]):
    """The attributes of an op; remembers which of them are read."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        super().__init__(attrs)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def check_reads_attrs(kernel: KernelDef, op: Op, context: BindContext) -> Call | tuple[Launch, ...]:
    """Bind `op` to a kernel. Raise AssertionError unless the kernel reads each attribute of `op` that it names."""
    attrs = _Read(op.attrs)
    watched = replace(op, attrs=attrs)
    kernel.supports(watched, context.target)
    kernel.workspace(watched, context.target)
    bound = kernel.bind(watched, context)
    unread = [f"{name}={op.attrs[name]!r}" for name in kernel.attrs if name in op.attrs and name not in attrs.names]
    assert not unread, f"a kernel of {op.kind} names attributes that it does not read: {', '.join(unread)}"
    return bound


def bind_kernel(
    kernels: Sequence[KernelDef],
    op: Op,
    contents: Mapping[Value, Tensor],
    *,
    skew: int = 0,
    rank: int = 0,
    deterministic: Deterministic = "auto",
) -> Binding:
    """Bind `op` to the first kernel that serves it. `rank`: whose parts its values are.

    Values without `contents` are outputs and start as NaN. Values with contents that the op does not write must not
    change. Buffers begin `skew` elements after a multiple of 256 bytes, except for scalars.
    """
    target = Target(training_device(), deterministic)
    kernel = choose(kernels, op, target)
    buffers: dict[Value, Guarded] = {}
    for value in dict.fromkeys((*op.ins, *op.outs)):
        shift = skew if value.shape else 0
        if value in contents:
            buffers[value] = guarded_copy(contents[value], constant=value not in op.written, skew=shift)
        else:
            assert value not in op.ins, f"{value!r} is read, but has no contents"
            buffers[value] = guarded(value.stored_shape, TORCH_DTYPES[value.dtype], skew=shift)
    scratch_bytes = kernel.workspace(op, target)
    scratch = guarded((scratch_bytes,), torch.uint8) if scratch_bytes else None
    binding = Binding(buffers, scratch, target, comm=SingleComm(rank))
    binding.launches = as_launches(check_reads_attrs(kernel, op, binding))
    for value, buffer in buffers.items():  # `bind` may have timed algorithms, which overwrites buffers
        if value in contents:
            buffer.tensor.copy_(contents[value])
        else:
            buffer.poison()
    return binding


def run_kernel(
    kernels: Sequence[KernelDef],
    op: Op,
    contents: Mapping[Value, Tensor],
    *,
    skew: int = 0,
    rank: int = 0,
    labels: int | None = None,
    deterministic: Deterministic = "auto",
) -> list[Tensor]:
    """Return the outputs of `op`, then the inputs that it changes, on the CPU.

    Checks that they are the same eagerly and captured, in every run, and that nothing is written outside the buffers.
    """
    binding = bind_kernel(kernels, op, contents, skew=skew, rank=rank, deterministic=deterministic)
    eager_and_graph(
        lambda stream: binding.launch(stream, labels), list(binding.buffers.values()), scratch=binding.workspaces
    )
    return [binding.buffers[out].tensor.cpu() for out in op.written]


def run_op(
    kernels: Sequence[KernelDef], definition: OpDef, ins: Sequence[Tensor | Elements], attrs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the outputs of an op for these inputs as `run_kernel` does. Its shape rule says what they are."""
    inputs = as_inputs(ins)
    specs = definition.infer(tuple(inputs), attrs)
    outs = tuple(Value(spec.label, spec.shape, spec.dtype, "act") for spec in specs)
    return run_kernel(kernels, Op(definition.kind, tuple(inputs), outs, dict(attrs)), inputs)
