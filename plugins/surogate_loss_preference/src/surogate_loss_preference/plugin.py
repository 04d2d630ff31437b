"""Hooks of `surogate-loss-preference`."""

from __future__ import annotations

from surogate_core.api import provides

from .losses import LOSSES
from .ops import OPS
from .pairs import PREFERENCE

SUROGATE_API = {"ops": 1, "losses": 1, "dataset_formats": 1}
surogate_ops = provides(OPS)
surogate_losses = provides(LOSSES)
surogate_dataset_formats = provides([PREFERENCE])
