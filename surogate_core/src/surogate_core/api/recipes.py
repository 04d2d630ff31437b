"""Precision recipes: the dtypes of a run, and a rewrite of its programs."""

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
    """The dtype keys that the user set; None for those that the recipe decides."""

    model_dtype: str | None = None
    matmul_dtype: str | None = None
    gradient_dtype: str | None = None
    master_dtype: str | None = None
    adapter_dtype: str | None = None
    param_grad_dtype: str | None = None
    optimizer_state_dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a run.

    model            weights, norms, activations
    matmul           operands of products in the forward pass
    gradient         operands of products in the backward pass
    master           the weights that the optimizer updates
    adapter          the weights of an adapter
    param_grad       accumulated gradients
    optimizer_state  moments
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

    precision   (request, options) -> Precision. Raises ConfigError with the valid combinations.
    supports    (device, precision, options) -> Support. Imports no compiled module, never raises.
    lower       (program, builder, precision, options) -> program. Called with the differentiated training program and
                with the evaluation program. If micro-steps write a state, they work on a copy, which the update commits
                if the gradient norm is finite (`program/passes/pending.py`).
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    precision: Callable[[PrecisionRequest, BaseModel], Precision]
    supports: Callable[[DeviceInfo, Precision, BaseModel], Support]
    lower: Callable[[Program, Builder, Precision, BaseModel], Program]
