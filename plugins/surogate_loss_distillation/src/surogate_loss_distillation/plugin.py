"""Hooks of `surogate-loss-distillation`."""

from __future__ import annotations

from surogate_core.api import provides

from .loss import DISTILLATION
from .ops import OPS

SUROGATE_API = {"ops": 1, "losses": 1}
_EXAMPLE = {"distillation_teacher": "a-model", "distillation_top_k": 4}  # of steps alone: no text goes through it
SUROGATE_EXAMPLES = {"loss distillation": [_EXAMPLE, {**_EXAMPLE, "distillation_kl": "reverse"}]}
surogate_ops = provides(OPS)
surogate_losses = provides([DISTILLATION])
