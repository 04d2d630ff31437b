"""Hooks of `surogate-lora`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .adapter import LORA
from .gradient_kernel import LORA_WGRAD_KERNEL
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {"ops": 1, "adapters": 1, "kernels": 1, "diagnose": 1}
SUROGATE_EXAMPLES = {
    "adapter lora": [{}, {"lora_init": "pissa", "lora_rank": 4, "lora_alpha": 4}],
    "op lora_principal": [
        {"ins": ["fp32[6,8]"], "attrs": {"row": 1, "rows": 4, "rank": 2, "scale": 0.5, "dtype": "fp32"}}
    ],
}
"""The examples that `surogate plugins test` runs."""

surogate_ops = provides(OPS)
surogate_adapters = provides([LORA])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_lora", (*KERNELS, LORA_WGRAD_KERNEL))
