"""Hooks of `surogate-models`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, KernelDef, ModelDef, OpDef, SystemInfo
from surogate_core.api.compiled import diagnose, of_module

from .kernels import KERNELS
from .llama import LLAMA
from .ops import OPS
from .qwen2 import QWEN2
from .qwen3 import QWEN3

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_models() -> Iterable[ModelDef]:
    return [LLAMA, QWEN2, QWEN3]


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return OPS


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    return of_module("surogate_models._C", KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    return diagnose("surogate_models", system)
