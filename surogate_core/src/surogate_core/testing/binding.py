"""For tests of a kernel on a GPU by its KernelDef: chosen, bound, launched and checked as in a run.

x, y = Value(name="x", ...), Value(name="y", ...)
(out,) = run_kernel(KERNELS, Op("silu", (x,), (y,)), {x: torch.randn(5, 64)})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..api import Call, Comm, Deterministic, KernelDef, Launch, Op, Target, Value
from ..plugins.registry import refusal
from ..reference.rounding import TORCH_DTYPES
from ..runtime.bind import as_parts
from ..runtime.device import training_device
from ..runtime.launch import SingleComm
from .kernels import Guarded, eager_and_graph, guarded, guarded_copy


@dataclass
class Binding:
    """An op bound to guarded buffers: the `BindContext` of its kernel, then its launch."""

    buffers: Mapping[Value, Guarded]
    scratch: Guarded | None
    target: Target
    stream: int = 0
    tables: list[Tensor] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    parts: tuple[Launch, ...] = ()
    comm: Comm = field(default_factory=SingleComm)

    def pointer(self, value: Value) -> int:
        return self.buffers[value].pointer

    @property
    def workspace(self) -> int:
        return self.scratch.pointer if self.scratch else 0

    def call(self, launch: Callable[..., None], *arguments: Any) -> Call:
        return launch, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        self.tables.append(torch.tensor(words, dtype=torch.int64, device="cuda"))
        return self.tables[-1].data_ptr()

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def autotune_cache(self, name: str, recall: Callable[..., None], tell: Callable[..., Any]) -> None:
        """Tests neither know of earlier runs nor leave anything to later ones."""

    def launch(self, stream: int, labels: int | None = None) -> None:
        """Enqueue the op on `stream`, which takes the place of the one that it was bound with.

        labels: leave out the parts that a batch with so many does not need; None: run them all.
        """
        for part in self.parts:
            if labels is None or labels > part.above:
                function, arguments = part.call
                function(*arguments[:-1], stream)

    @property
    def workspaces(self) -> list[Guarded]:
        """The workspace, if the op has one."""
        return [self.scratch] if self.scratch else []

    @property
    def everything(self) -> list[Guarded]:
        """All buffers, the workspace too."""
        return [*self.buffers.values(), *self.workspaces]


def choose(kernels: Sequence[KernelDef], op: Op, target: Target) -> KernelDef:
    """The first kernel that serves `op`. AssertionError with every refusal when none does."""
    dtypes = tuple(value.dtype for value in (*op.ins, *op.outs))
    reasons = [(kernel, refusal(kernel, op, dtypes, target)) for kernel in kernels if kernel.op == op.kind]
    for kernel, reason in reasons:
        if not reason:
            return kernel
    raise AssertionError(f"no kernel serves {op.kind}: {'; '.join(reason for _, reason in reasons)}")


def bind_kernel(
    kernels: Sequence[KernelDef],
    op: Op,
    contents: Mapping[Value, Tensor],
    *,
    skew: int = 0,
    deterministic: Deterministic = "auto",
) -> Binding:
    """`op`, bound to the kernel that serves it.

    What `contents` does not give is an output and holds NaN; what is given and no output must stay as it is. Buffers
    begin `skew` elements past a multiple of 256 bytes, scalars excepted.
    """
    target = Target(training_device(), deterministic)
    kernel = choose(kernels, op, target)
    buffers: dict[Value, Guarded] = {}
    for value in dict.fromkeys((*op.ins, *op.outs)):
        shift = skew if value.shape else 0
        if value in contents:
            buffers[value] = guarded_copy(contents[value], constant=value not in op.outs, skew=shift)
        else:
            assert value not in op.ins, f"{value!r} is read, but has no contents"
            buffers[value] = guarded(value.shape, TORCH_DTYPES[value.dtype], skew=shift)
    scratch_bytes = kernel.workspace(op, target)
    binding = Binding(buffers, guarded((scratch_bytes,), torch.uint8) if scratch_bytes else None, target)
    binding.parts = as_parts(kernel.bind(op, binding))
    for out in op.outs:  # a bind may time algorithms on them
        if out in contents:
            buffers[out].tensor.copy_(contents[out])
        else:
            buffers[out].poison()
    return binding


def run_kernel(
    kernels: Sequence[KernelDef],
    op: Op,
    contents: Mapping[Value, Tensor],
    *,
    skew: int = 0,
    labels: int | None = None,
    deterministic: Deterministic = "auto",
) -> list[Tensor]:
    """The outputs of `op`, on the CPU, after `eager_and_graph`: repeatable, capturable, within its buffers."""
    binding = bind_kernel(kernels, op, contents, skew=skew, deterministic=deterministic)
    eager_and_graph(
        lambda stream: binding.launch(stream, labels), list(binding.buffers.values()), scratch=binding.workspaces
    )
    return [binding.buffers[out].tensor.cpu() for out in op.outs]
