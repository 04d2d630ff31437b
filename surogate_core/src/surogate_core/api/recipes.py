"""Precision recipes: dtypes, and a rewrite of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from ..origin import Definition
from ..program.op import Program
from .base import DeviceInfo, NoOptions, Support

if TYPE_CHECKING:
    from ..program.builder import Builder


@dataclass(frozen=True, kw_only=True)
class PrecisionRequest:
    """The dtype keys as the user wrote them; None where left to the default."""

    model_dtype: str | None = None
    matmul_dtype: str | None = None
    gradient_dtype: str | None = None
    master_dtype: str | None = None
    adapter_dtype: str | None = None
    param_grad_dtype: str | None = None
    optimizer_state_dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a run, all decided.

    model: weights, norms, activations. matmul: operands of forward products. gradient: operands of backward products.
    master: what the optimizer updates. adapter: weights of an adapter.
    param_grad: accumulated gradients. optimizer_state: moments.
    """

    model: str
    matmul: str
    gradient: str
    master: str
    adapter: str
    param_grad: str
    optimizer_state: str


@dataclass(frozen=True, kw_only=True)
class RecipeDef(Definition):
    """A precision recipe.

    precision   decides the dtypes; raises ConfigError naming the legal combinations
    supports    (device, precision, options) -> Support; imports no compiled module, never raises
    lower       rewrites a differentiated program; called on the training and on the evaluation program
                A state that it lets micro-steps write changes when the step is applied: they work on a copy, which the
                update commits if the gradient norm is finite (`program/passes/pending.py`).
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    precision: Callable[[PrecisionRequest, BaseModel], Precision]
    supports: Callable[[DeviceInfo, Precision, BaseModel], Support]
    lower: Callable[[Program, Builder, Precision, BaseModel], Program]
