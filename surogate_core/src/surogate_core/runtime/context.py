"""The context in which a worker's programs are bound and executed on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..api import Comm, KernelDef, Op, OpDef, Target
from .launch import SingleComm

KernelFor = Callable[[Op], KernelDef | None]
"""Return the kernel that serves an op, or None if its torch reference is to be used."""

UseAutotuneCache = Callable[[str, Callable[[Mapping[str, str]], None], Callable[[], Mapping[str, str]]], None]
"""The signature of `BindContext.autotune_cache`: (name, load, dump)."""


def no_autotune_cache(
    name: str, load: Callable[[Mapping[str, str]], None], dump: Callable[[], Mapping[str, str]]
) -> None:
    """Cache nothing: kernels are timed again in every run."""


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """Everything but the programs, their buffers and their streams.

    ops             op definitions by kind
    kernel_for      selects the kernel of each op
    target          device and determinism that kernels are selected and bound for
    notice          called with lines for the user; may get the same line several times
    autotune_cache  what `BindContext.autotune_cache` calls
    comm            the communicator of this rank; its `device` is the GPU to run on
    allow_reference whether an op without a kernel may run its torch reference
    """

    ops: Mapping[str, OpDef]
    kernel_for: KernelFor
    target: Target
    notice: Callable[[str], None]
    autotune_cache: UseAutotuneCache = no_autotune_cache
    comm: Comm = field(default_factory=SingleComm)
    allow_reference: bool = False
