"""Hooks of `surogate-optim-adamw-8bit`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .optimizer import ADAMW_8BIT, ADAMW_8BIT_OP

SUROGATE_API = {"ops": 1, "optimizers": 1, "kernels": 1, "diagnose": 1}
surogate_ops = provides([ADAMW_8BIT_OP])
surogate_optimizers = provides([ADAMW_8BIT])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_optim_adamw_8bit", KERNELS)
