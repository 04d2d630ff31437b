"""Precision recipes: the dtypes of a run, and the lowering of its programs to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal

from ..dtypes import DtypeName
from ..origin import Declared, Definition, Name, Share
from ..program.inputs import Scalars
from ..program.op import Op, Program
from ..program.opdef import ParamKind
from ..program.value import Value
from .base import DeviceInfo, NoOptions, Options, Support, Target
from .models import Matrix

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
class Precision(Declared):
    """The dtypes of a run.

    model            weights, norms, activations
    matmul           operands of products in the forward pass
    gradient         operands of products in the backward pass
    master           the weights that the optimizer updates
    adapter          the weights of an adapter
    param_grad       accumulated gradients
    optimizer_state  moments
    """

    model: DtypeName
    matmul: DtypeName
    gradient: DtypeName
    master: DtypeName
    adapter: DtypeName
    param_grad: DtypeName
    optimizer_state: DtypeName


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """A param of a run.

    of_model  it is a weight of the model, which checkpoints hold. Params of adapters and heads of losses are not.
    kind      what the param is. An embedding that is also the LM head is an "embedding".
    matrices  of a param with two dimensions: its logical matrices from the first row to the last, named after the
              tensors of the checkpoint. A param that is not fused is one matrix. Empty for other shapes.
    precise   no recipe quantizes it (`WeightMap.precise`)
    parameter of experts, the name of their parameter (`WeightMap.parameter`); "" of all others
    grad      its accumulated gradient; None if it is frozen
    master    what the optimizer updates: the param itself, or a state in `master_dtype`. None if it is frozen.
    part, grad_part
              this rank's part of the param and of its gradient, of which the master then is a part too; None: each rank
              updates the whole
    amax      fp32 [], which the update writes: the largest magnitude of the whole updated param. None unless the recipe
              asks for it (`RecipeDef.reads_amax`) and the optimizer computes it.
    """

    param: Value
    of_model: bool
    kind: ParamKind
    matrices: tuple[Matrix, ...]
    grad: Value | None = None
    master: Value | None = None
    part: Value | None = None
    grad_part: Value | None = None
    amax: Value | None = None
    precise: bool = False
    parameter: str = ""


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in a numerics report. `block`: index of its transformer block, -1 outside of blocks."""

    name: str
    block: int


@dataclass(frozen=True)
class NumericsColumn:
    """A figure of every tensor in a numerics report. `unit`: "magnitude", "share" (of 1) or "steps"."""

    name: str
    unit: Literal["magnitude", "share", "steps"]
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The report of a recipe on the tensors that it quantizes (`numerics_report_steps`).

    micro    computes what `Programs.micro` computes, to the bit, and writes `values`
    values   fp32 [tensors, columns], a state that nothing else uses
    """

    micro: Program
    values: Value
    tensors: tuple[QuantizedTensor, ...]
    columns: tuple[NumericsColumn, ...]


@dataclass(frozen=True)
class Refusal:
    """The reason why a run cannot be right, of a kind that shows only when its weights are loaded.

    count    int32 [], a derived state that `derive` writes: how many numbers are wrong. Unless it is 0, the run ends
             before its first step.
    message  what follows the count in the error: what is wrong, where, and what to do
    """

    count: Value
    message: str


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a run, which a recipe lowers together, and an offload strategy schedules.

    micro      forward and backward pass of a micro-step
    evaluate   forward pass of an evaluation
    update     gradient norm, then the optimizer
    clip_coef  fp32 [], an activation of the update: the factor of the gradients. If it is not finite, the step is
               skipped.
    derive     writes the derived states from params, before anything else runs: at every start, resumed or not
    start      writes the masters from params, before `derive`: at the start of a fresh run
    calibrate  the micro-steps of the first optimizer step of a fresh run, and while the steps are skipped of the next
               ones, where they differ; None: as `micro`
    numerics   the micro-step that reports on numerics, if `LowerContext.numerics` asks for it; None: the recipe has no
               such report
    refusals   what ends a run when its weights are loaded
    """

    micro: Program
    evaluate: Program
    update: Program
    clip_coef: Value
    derive: Program
    start: Program
    calibrate: Program | None = None
    numerics: Numerics | None = None
    refusals: tuple[Refusal, ...] = ()

    def micro_steps(self) -> tuple[Program, ...]:
        """Return the programs of micro-steps, in the order in which they first run."""
        calibrate = () if self.calibrate is None else (self.calibrate,)
        numerics = () if self.numerics is None else (self.numerics.micro,)
        return (*calibrate, self.micro, *numerics)

    def with_micro_steps(self, change: Callable[[Program], Program]) -> Programs:
        """Return programs with `change(program)` in place of each program of micro-steps."""
        calibrate, numerics = self.calibrate, self.numerics
        return replace(
            self,
            micro=change(self.micro),
            calibrate=calibrate and change(calibrate),
            numerics=numerics and replace(numerics, micro=change(numerics.micro)),
        )

    def appending(self, derive: Iterable[Op], update: Iterable[Op]) -> Programs:
        """Return programs with these ops at the end of `derive` and `update`."""
        return replace(
            self,
            derive=replace(self.derive, ops=(*self.derive.ops, *derive)),
            update=replace(self.update, ops=(*self.update.ops, *update)),
        )

    def all(self) -> tuple[Program, ...]:
        """Return all programs, in the order in which they first run."""
        return (self.start, self.derive, *self.micro_steps(), self.evaluate, self.update)


@dataclass(frozen=True, kw_only=True)
class LowerContext(Generic[Options]):
    """Arguments of `RecipeDef.lower` besides the programs.

    builder  declares states and emits ops
    target   the device; None for programs that are assembled for no device, which references run
    params   every param of the run
    options  the recipe's validated options
    numerics the user asked for numerics reports
    stored   {frozen param: the states that hold it in the run's weight format}. Ops may read either.
    layout   of these states (`WeightFormatDef.layout`)
    """

    builder: Builder
    target: Target | None
    precision: Precision
    scalars: Scalars
    params: Mapping[Value, ParamInfo]
    options: Options
    numerics: bool = False
    stored: Mapping[Value, Sequence[Value]] = field(default_factory=dict)
    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class RecipeDef(Definition, Generic[Options]):
    """A precision recipe.

    precision      (request, options) -> Precision. Raises ConfigError with the valid combinations.
    supports       (device, precision, options) -> Support. Imports no compiled module, never raises.
    lower          (programs, context) -> Programs. Called once, with differentiated programs that contain no
                   recomputation and write gradients once. Raises ConfigError if the recipe cannot serve the model. Ops
                   whose results are not read are removed afterwards. States that it declares: those of `derive` are
                   `derived`; those that micro-steps combine have `collects`. If micro-steps write another state that
                   the update does not write, they work on a copy, which the update commits if the step is not skipped.
    reads_amax     (trained param, precision, options) -> whether `lower` reads its `amax`
    product_error  (precision, options) -> relative rms error of a matrix product because of its operands' rounding,
                   beyond that of bf16. `surogate verify` allows for it.
    kernels_of     names of the recipes whose kernels it builds on: their packages serve the ops that its own does not
    products       pairs (matmul_dtype, gradient_dtype) that `lower` serves; None: every pair that `precision` returns.
                   Other pairs are served by a LoweringDef, if a package provides one.
    """

    name: Name
    summary: str
    options: type[Options] = NoOptions  # type: ignore[assignment]
    precision: Callable[[PrecisionRequest, Options], Precision]
    supports: Callable[[DeviceInfo, Precision, Options], Support]
    lower: Callable[[Programs, LowerContext[Options]], Programs]
    reads_amax: Callable[[ParamInfo, Precision, Options], bool] = lambda info, precision, options: False
    product_error: Callable[[Precision, Options], Share] = lambda precision, options: 0.0
    kernels_of: tuple[Name, ...] = ()
    products: tuple[tuple[DtypeName, DtypeName], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class LoweringDef(Definition):
    """Products of a pair of operand dtypes, for recipes that do not serve the pair themselves.

    matmul, gradient
              the dtypes of the operands: `matmul_dtype` and `gradient_dtype`
    supports  (device, precision) -> Support
    lower     (programs, context) -> Programs, in place of the recipe's. `context.options` are those of the recipe.
    product_error
              precision -> the same as that of a recipe
    """

    matmul: DtypeName
    gradient: DtypeName
    summary: str
    supports: Callable[[DeviceInfo, Precision], Support]
    lower: Callable[[Programs, LowerContext[Any]], Programs]
    product_error: Callable[[Precision], Share] = lambda precision: 0.0

    @property
    def name(self) -> str:
        """The pair as text: "e4m3/e5m2"."""
        return f"{self.matmul}/{self.gradient}"
