"""Hooks of `acme-surogate-sgd`. Light: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from surogate_core.api import ModelDef, OpDef, OptimizerDef

from .mlp import MLP, SQUARED_RELU
from .sgd import SGD, SGD_OP

SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return [SQUARED_RELU, SGD_OP]


@hookimpl
def surogate_models() -> Iterable[ModelDef]:
    return [MLP]


@hookimpl
def surogate_optimizers() -> Iterable[OptimizerDef]:
    return [SGD]
