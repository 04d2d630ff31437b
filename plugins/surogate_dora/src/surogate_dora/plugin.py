"""Hooks of `surogate-adapter-dora`."""

from __future__ import annotations

from surogate_core.api import provides

from .adapter import DORA
from .ops import OPS

SUROGATE_API = 0
surogate_ops = provides(OPS)
surogate_adapters = provides([DORA])
