"""Hooks of `surogate-models-hybrid`."""

from __future__ import annotations

from surogate_core.api import provides

from .ops import OPS

SUROGATE_API = {"ops": 1}
surogate_ops = provides(OPS)
