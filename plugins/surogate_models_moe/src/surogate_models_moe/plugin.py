"""Hooks of `surogate-models-moe`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks
from surogate_models.api import TINY_CONFIG

from .kernels import KERNELS
from .olmoe import OLMOE
from .ops import OPS
from .qwen3_moe import QWEN3_MOE

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
_FEW = {**TINY_CONFIG, "num_experts": 5, "num_experts_per_tok": 2}
SUROGATE_EXAMPLES = {"model qwen3_moe": [_FEW | {"moe_intermediate_size": 32}], "model olmoe": [_FEW]}
surogate_models = provides([QWEN3_MOE, OLMOE])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models_moe", KERNELS)
