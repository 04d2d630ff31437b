"""Hooks of `surogate-lora`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import AdapterDef, OpDef

from .adapter import LORA
from .ops import OPS

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return OPS


@hookimpl
def surogate_adapters() -> Iterable[AdapterDef]:
    return [LORA]
