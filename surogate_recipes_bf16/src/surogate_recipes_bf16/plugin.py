"""Hooks of `surogate-recipe-bf16`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import Finding, SystemInfo, provides
from surogate_core.api.compiled import compiled_hooks, diagnose

from . import diagnosis
from .kernels import KERNELS
from .recipe import BF16

SUROGATE_API = {"recipes": 1, "kernels": 1, "diagnose": 1}
hookimpl = pluggy.HookimplMarker("surogate")
surogate_recipes = provides([BF16])
surogate_kernels = compiled_hooks("surogate_recipes_bf16", KERNELS)[0]


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    """Report the compiled module, and the libraries of NVIDIA that it loads."""
    return [*diagnose("surogate_recipes_bf16", system), *diagnosis.diagnose(system)]
