"""Hooks of `surogate-models-mistral`."""

from __future__ import annotations

from surogate_core.api import provides

from .mistral import MINISTRAL, MISTRAL

SUROGATE_API = {"models": 1}
surogate_models = provides([MISTRAL, MINISTRAL])
