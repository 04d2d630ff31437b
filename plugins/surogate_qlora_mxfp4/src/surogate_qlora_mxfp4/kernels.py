"""The compiled ops of MXFP4 storage: `KernelDef`s for csrc/."""

from __future__ import annotations

from surogate_core.api import KernelDef

KERNELS: tuple[KernelDef, ...] = ()
