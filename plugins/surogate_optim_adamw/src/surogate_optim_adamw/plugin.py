"""Hooks of `surogate-optim-adamw`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .adamw import ADAMW, ADAMW_OP
from .kernels import KERNELS

SUROGATE_API = {"ops": 1, "optimizers": 1, "kernels": 1, "diagnose": 1}
surogate_ops = provides([ADAMW_OP])
surogate_optimizers = provides([ADAMW])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_optim_adamw", KERNELS)
