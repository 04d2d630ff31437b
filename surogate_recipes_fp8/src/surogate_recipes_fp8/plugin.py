"""Hooks of `surogate-recipe-fp8`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

from .kernels import KERNELS

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_recipes_fp8._C", KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_recipes_fp8", system)
