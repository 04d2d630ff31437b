"""Hooks of `surogate-optim-normuon`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .optimizer import NORMUON, NORMUON_OP

SUROGATE_API = {"ops": 1, "optimizers": 1, "kernels": 1, "diagnose": 1}
surogate_ops = provides([NORMUON_OP])
surogate_optimizers = provides([NORMUON])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_optim_normuon", KERNELS)
