"""Hooks of `surogate-models-olmo`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_models.api import TINY_CONFIG

from .olmo import OLMO2, OLMO3

SUROGATE_API = {"models": 1}
SUROGATE_EXAMPLES = {"model olmo3": [{**TINY_CONFIG, "rope_parameters": None}]}
surogate_models = provides([OLMO2, OLMO3])
