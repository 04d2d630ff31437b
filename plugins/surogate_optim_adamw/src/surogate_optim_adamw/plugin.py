"""Hooks of `surogate-optim-adamw`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import KernelDef, OpDef, OptimizerDef

from .adamw import ADAMW, ADAMW_OP
from .kernels import KERNELS

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return [ADAMW_OP]


@hookimpl
def surogate_optimizers() -> Iterable[OptimizerDef]:
    return [ADAMW]


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return KERNELS
