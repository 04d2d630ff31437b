"""Hooks of `surogate-lora`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import AdapterDef, Finding, KernelDef, OpDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

from .adapter import LORA
from .gradient_kernel import LORA_WGRAD_KERNEL
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return OPS


@hookimpl
def surogate_adapters() -> Iterable[AdapterDef]:
    return [LORA]


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_lora._C", (*KERNELS, LORA_WGRAD_KERNEL))


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_lora", system)
