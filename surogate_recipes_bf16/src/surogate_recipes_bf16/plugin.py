"""Hooks of `surogate-recipe-bf16`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, RecipeDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

from . import diagnosis
from .kernels import KERNELS
from .recipe import BF16

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_recipes() -> Iterable[RecipeDef]:
    return [BF16]


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_recipes_bf16._C", KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return [*diagnose("surogate_recipes_bf16", system), *diagnosis.diagnose(system)]
