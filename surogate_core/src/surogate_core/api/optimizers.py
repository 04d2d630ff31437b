"""Optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..origin import Definition
from ..program.inputs import Scalars
from ..program.value import Value
from .base import NoOptions
from .recipes import Precision

if TYPE_CHECKING:
    from ..program.builder import Builder


@dataclass(frozen=True)
class ParamGrad:
    """A trained param, its accumulated gradient, and its master: the param itself, or a state in `master_dtype`.

    amax  fp32 []: where the optimizer may write the largest magnitude of the updated param, which the recipe reads. If
          it does not, the recipe computes it in a pass of its own. None if nobody reads it.
    """

    param: Value
    grad: Value
    master: Value
    amax: Value | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerDef(Definition):
    """An optimizer.

    update  (builder, params, clip_coef, scalars, precision, weight_decay, options): emits the update of all params.
            Declares its states by `builder.state(name, shape, dtype, init)`. The gradient to use is `clip_coef * grad`.
            If `clip_coef` is not finite, the step is skipped: the ops must not change any value.
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    update: Callable[[Builder, Sequence[ParamGrad], Value, Scalars, Precision, float, Any], None]
