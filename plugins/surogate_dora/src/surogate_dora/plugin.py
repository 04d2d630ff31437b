"""Hooks of `surogate-adapter-dora`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .adapter import DORA
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {"ops": 1, "adapters": 1, "kernels": 1, "diagnose": 1}
surogate_ops = provides(OPS)
surogate_adapters = provides([DORA])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_dora", KERNELS)
