"""Hooks of `surogate-optim-normuon`."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import OpDef, OptimizerDef

from .optimizer import NORMUON, NORMUON_OP

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return [NORMUON_OP]


@hookimpl
def surogate_optimizers() -> Iterable[OptimizerDef]:
    return [NORMUON]
