"""Hooks of `surogate-optim-adamw-8bit`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, OpDef, OptimizerDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

from .kernels import KERNELS
from .optimizer import ADAMW_8BIT, ADAMW_8BIT_OP

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return [ADAMW_8BIT_OP]


@hookimpl
def surogate_optimizers() -> Iterable[OptimizerDef]:
    return [ADAMW_8BIT]


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_optim_adamw_8bit._C", KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_optim_adamw_8bit", system)
