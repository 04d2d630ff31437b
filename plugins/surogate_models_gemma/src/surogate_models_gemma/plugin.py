"""Hooks of `surogate-models-gemma`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .gemma import GEMMA2, GEMMA3
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
SUROGATE_EXAMPLES = {"model gemma3": [{"rope_parameters": None, "sliding_window_pattern": 2}]}
surogate_models = provides([GEMMA2, GEMMA3])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models_gemma", KERNELS)
