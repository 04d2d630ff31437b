"""Hooks of `surogate-recipe-nvfp4`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import LoweringDef, OpDef, RecipeDef

from .ops import OPS
from .recipe import E2M1, NVFP4

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_recipes() -> Iterable[RecipeDef]:
    return [NVFP4]


@hookimpl
def surogate_lowerings() -> Iterable[LoweringDef]:
    return [E2M1]


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return OPS
