"""Hooks of `surogate-recipe-fp8`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .ops import OPS
from .recipe import E4M3_E5M2, FP8_HYBRID

SUROGATE_API = {"recipes": 1, "lowerings": 1, "ops": 1, "kernels": 1, "diagnose": 1}
surogate_recipes = provides([FP8_HYBRID])
surogate_lowerings = provides([E4M3_E5M2])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_recipes_fp8", KERNELS)
