"""Hooks of `acme-surogate-sgd`. Light: nothing here imports torch."""

from __future__ import annotations

from surogate_core.api import provides

from .mlp import MLP, SQUARED_RELU
from .sgd import SGD, SGD_OP

SUROGATE_API = {"ops": 1, "models": 1, "optimizers": 1}
surogate_ops = provides([SQUARED_RELU, SGD_OP])
surogate_models = provides([MLP])
surogate_optimizers = provides([SGD])
