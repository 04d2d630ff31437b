"""Hooks of `surogate-recipe-nvfp4`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .ops import OPS
from .recipe import E2M1, NVFP4

SUROGATE_API = {"recipes": 1, "lowerings": 1, "ops": 1, "kernels": 1, "diagnose": 1}
surogate_recipes = provides([NVFP4])
surogate_lowerings = provides([E2M1])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_recipes_nvfp4", KERNELS)
