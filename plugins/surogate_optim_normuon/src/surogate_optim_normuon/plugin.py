"""Hooks of `surogate-optim-normuon`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, OpDef, OptimizerDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

from .kernels import KERNELS
from .optimizer import NORMUON, NORMUON_OP

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return [NORMUON_OP]


@hookimpl
def surogate_optimizers() -> Iterable[OptimizerDef]:
    return [NORMUON]


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_optim_normuon._C", KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_optim_normuon", system)
