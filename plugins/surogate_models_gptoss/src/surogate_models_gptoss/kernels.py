"""The compiled ops of attention sinks: `KernelDef`s for csrc/."""

from __future__ import annotations

from surogate_core.api import KernelDef

KERNELS: tuple[KernelDef, ...] = ()
