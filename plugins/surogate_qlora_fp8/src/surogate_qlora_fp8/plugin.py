"""Hooks of `surogate-qlora-fp8`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, OpDef, SystemInfo, WeightFormatDef
from surogate_core.api.compiled import diagnose, of_module

from .format import FP8
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return OPS


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_qlora_fp8._C", KERNELS)


@hookimpl
def surogate_weight_formats() -> Iterable[WeightFormatDef]:
    return [FP8]


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_qlora_fp8", system)
