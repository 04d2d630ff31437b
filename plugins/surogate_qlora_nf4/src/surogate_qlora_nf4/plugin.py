"""Hooks of `surogate-qlora-nf4`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .exports import EXPORT
from .format import NF4
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {"ops": 1, "weight_formats": 1, "export_formats": 1, "kernels": 1, "diagnose": 1}
surogate_ops = provides(OPS)
surogate_weight_formats = provides([NF4])
surogate_export_formats = provides([EXPORT])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_qlora_nf4", KERNELS)
