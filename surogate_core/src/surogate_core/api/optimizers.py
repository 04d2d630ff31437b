"""Optimizers and offload strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..origin import Definition
from ..program.inputs import Scalars
from ..program.op import Program
from ..program.value import Value
from .base import NoOptions
from .recipes import Precision

if TYPE_CHECKING:
    from ..program.builder import Builder


@dataclass(frozen=True)
class ParamGrad:
    """A trainable param, its accumulated gradient, and its master: the param itself, or a state in `master_dtype`."""

    param: Value
    grad: Value
    master: Value


@dataclass(frozen=True, kw_only=True)
class OptimizerDef(Definition):
    """An optimizer: appends update ops for all params at once.

    `update(builder, params, clip_coef, scalars, precision, weight_decay, options)`. States are made by
    `builder.state(name, shape, dtype, init)`. The gradient to use is `clip_coef * grad`; when `clip_coef` is not
    finite the op must write nothing: the step is skipped.
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    update: Callable[[Builder, Sequence[ParamGrad], Value, Scalars, Precision, float, Any], None]


@dataclass(frozen=True, kw_only=True)
class OffloadDef(Definition):
    """A strategy that moves values to the host: (program, builder, device bytes to stay under, options) -> program."""

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    schedule: Callable[[Program, Builder, int, BaseModel], Program]
