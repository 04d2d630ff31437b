"""Hooks of `surogate-models-moe`."""

from __future__ import annotations

from surogate_core.api import provides

from .olmoe import OLMOE
from .ops import OPS
from .qwen3_moe import QWEN3_MOE

SUROGATE_API = {"models": 1, "ops": 1}
surogate_models = provides([QWEN3_MOE, OLMOE])
surogate_ops = provides(OPS)
