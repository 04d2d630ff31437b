"""Hooks of `surogate-recipe-nvfp4`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, LoweringDef, OpDef, RecipeDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

from .kernels import KERNELS
from .ops import OPS
from .recipe import E2M1, NVFP4

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_recipes() -> Iterable[RecipeDef]:
    return [NVFP4]


@hookimpl
def surogate_lowerings() -> Iterable[LoweringDef]:
    return [E2M1]


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return OPS


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_recipes_nvfp4._C", KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_recipes_nvfp4", system)
