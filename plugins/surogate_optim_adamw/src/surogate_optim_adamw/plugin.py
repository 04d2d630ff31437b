"""Hooks of `surogate-optim-adamw`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, OpDef, OptimizerDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

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
    return of_module("surogate_optim_adamw._C", KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_optim_adamw", system)
