"""Hooks of `surogate-loss-tokens`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .loss import TOKENS
from .ops import OPS
from .weighted import WEIGHTED

SUROGATE_API = {"ops": 1, "kernels": 1, "losses": 1, "dataset_formats": 1, "diagnose": 1}
SUROGATE_EXAMPLES = {
    "format weighted": [{"segments": [{"text": "to be", "weight": 0}, {"text": " or not to be", "weight": 0.5}]}],
    "loss tokens": [{"tokens_z_loss": 1e-3, "tokens_label_smoothing": 0.1}],
}
surogate_ops = provides(OPS)
surogate_losses = provides([TOKENS])
surogate_dataset_formats = provides([WEIGHTED])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_loss_tokens", KERNELS)
