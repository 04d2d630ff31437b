"""Optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from ..dtypes import DtypeName
from ..origin import Definition, Name
from ..program.inputs import Scalars
from ..program.opdef import ParamKind
from ..program.value import Value
from .base import NoOptions, Options
from .models import Matrix
from .recipes import ParamInfo, Precision

if TYPE_CHECKING:
    from ..program.builder import Builder


@dataclass(frozen=True, kw_only=True)
class TrainedParam:
    """A trained param, its accumulated gradient, and its master: the param itself, or a state in `master_dtype`.

    On several ranks these values may be this rank's part of them, consecutive elements in one dimension. A param that
    the optimizer needs whole (`OptimizerDef.granularity`) is whole.

    name  of the whole param; states are named after it
    shape of the whole param
    of_model, kind, matrices
          as in `ParamInfo`
    amax  fp32 []: where the optimizer may write the largest magnitude of the updated `param`, which the recipe reads;
          core combines those of parts. If it does not, the recipe computes it in a pass of its own. None if nobody
          reads it.
    """

    param: Value
    grad: Value
    master: Value
    of_model: bool
    kind: ParamKind
    matrices: tuple[Matrix, ...]
    amax: Value | None = None

    @property
    def name(self) -> str:
        return (self.param.inside or self.param).name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.param.shard.shape if self.param.shard else self.param.shape


@dataclass(frozen=True, kw_only=True)
class UpdateContext(Generic[Options]):
    """Arguments of `OptimizerDef.update`: a group of params and the scalars of a step.

    builder       emits ops and declares states
    params        the group: all trained params of a run, or some of them. Never empty.
    clip_coef     fp32 [], the factor of the gradients. If it is not finite, the step is skipped.
    scalars       learning rate, step and seed: values, which change from step to step
    precision     the dtypes of the run
    weight_decay  the key `weight_decay`. The optimizer decides which params it applies to.
    options       the optimizer's validated options
    """

    builder: Builder
    params: Sequence[TrainedParam]
    clip_coef: Value
    scalars: Scalars
    precision: Precision
    weight_decay: float
    options: Options


@dataclass(frozen=True, kw_only=True)
class OptimizerDef(Definition, Generic[Options]):
    """An optimizer.

    update  (context): emits the update of the params of a group. Core calls it once for each group: what it computes
            for a param must not depend on the group. Declares its states by `builder.state(name, shape, dtype, init)`,
            named after their params. The gradient to use is `clip_coef * grad`. If `clip_coef` is not finite, the step
            is skipped: the ops must not change any value.
    granularity
            param -> how many consecutive elements the update must have together: 1 if it is element by element, or a
            power of two up to 256. Ranks then hold a part of the states each (ZeRO), and the result for a part must be
            that part of the result for the whole. `param.param.size`: all. Then one rank updates the param and holds
            its states, in any shapes; params go to ranks by the FLOPs of their updates. 0: every rank updates the
            param. None: every rank updates all params.
    state_dtypes
            values of `optimizer_state_dtype` that `update` does not refuse: only these are suggested for a run that
            does not fit
    """

    name: Name
    summary: str
    options: type[Options] = NoOptions  # type: ignore[assignment]
    update: Callable[[UpdateContext[Options]], None]
    granularity: Callable[[ParamInfo], int] | None = None
    state_dtypes: tuple[DtypeName, ...] = ("fp32", "bf16")
