"""Hooks of `surogate-models`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .llama import LLAMA
from .ops import OPS
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .smollm3 import SMOLLM3

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
surogate_models = provides([LLAMA, QWEN2, QWEN3, SMOLLM3])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models", KERNELS)
