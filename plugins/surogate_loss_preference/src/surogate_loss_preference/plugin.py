"""Hooks of `surogate-loss-preference`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .kto import KTO, KTO_OPS, LABELLED
from .losses import LOSSES
from .ops import OPS
from .pairs import PREFERENCE, PREFERENCE_WITH_MARGIN
from .reward import REWARD

SUROGATE_API = {"ops": 1, "kernels": 1, "losses": 1, "dataset_formats": 1, "diagnose": 1}
surogate_ops = provides([*OPS, *KTO_OPS])
surogate_losses = provides([*LOSSES, KTO, REWARD])
surogate_dataset_formats = provides([PREFERENCE, PREFERENCE_WITH_MARGIN, LABELLED])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_loss_preference", KERNELS)
