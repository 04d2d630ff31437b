"""Hooks of `surogate-models-phi`."""

from __future__ import annotations

from surogate_core.api import provides

from .phi3 import PHI3

SUROGATE_API = {"models": 1}
surogate_models = provides([PHI3])
