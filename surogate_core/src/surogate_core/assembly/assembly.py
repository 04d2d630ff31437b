"""The planned programs of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..api import BatchInputs, Numerics, Refusal, Scalars, WeightMap
from ..api.models import Unit
from ..memory.plan import MemoryPlan
from ..program.op import Program, Purpose, Stage
from ..program.passes.reduce import MicroStep
from ..program.value import Value
from .resolve import KernelTable
from .staging import Staged
from .verifier import Verifier

ADAPTER_START = "start_adapter"
"""The program of the stage "start" with the ops of `AdapterDef.start`."""


@dataclass(frozen=True)
class Reported:
    """A `Metric`: the states that hold its value after an optimizer step, and after an evaluated batch."""

    name: str
    per: Unit
    step: Value
    evaluation: Value
    of: Callable[[Any], float | None]
    doubt: Callable[[Any], str]
    headline: bool = False


def metrics_of(reported: Sequence[Reported], values: Sequence[Any]) -> dict[str, float]:
    """Return the metrics of a step or an evaluation by name. values: of `reported` after the loss, as they were read.

    Raises PluginError if the `of` of a metric fails.
    """
    found = {figure.name: figure.of(value) for figure, value in zip(reported[1:], values, strict=True)}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The planned programs of a run and the values that the loop reads and writes.

    variants    {name of a program that reads documents: the same program for batches of fewer documents}, in ascending
                order of `Program.documents`
    staging     the programs of `derive` that read staged params. The others run at every start.
    stored      {frozen param: the states that hold it in the run's weight format}
    cu_seqlens  {`Program.documents`: the input that those variants read}
    pending     copies of states that each step writes again; checkpoints do not hold them
    kernels     what runs each op
    passed      the passes that ran; `passed.verify` runs the checks of a draft
    reported    the loss, then the other metrics of the run's loss and of the model
    numerics    what the programs of the purpose "report" write; None: there are none
    refusals    what ends the run when its weights are loaded
    cached      what an evaluation writes of each document (`LossDef.cached_reference`), if anything
    micro       the micro-step before anything is recomputed, accumulated or summed over workers; never run
    """

    programs: Mapping[str, Program]
    variants: Mapping[str, tuple[Program, ...]]
    cu_seqlens: Mapping[int, Value]
    declared: tuple[Value, ...]
    staging: tuple[Staged, ...]
    trainable: tuple[Value, ...]
    stored: Mapping[str, tuple[Value, ...]]
    memory: MemoryPlan
    kernels: KernelTable
    micro: Program
    batch: BatchInputs
    scalars: Scalars
    reported: tuple[Reported, ...]
    grad_norm: Value
    weights: tuple[WeightMap, ...]
    pending: tuple[Value, ...]
    passed: Verifier
    world_size: int
    numerics: Numerics | None = None
    refusals: tuple[Refusal, ...] = ()
    cached: tuple[Value, ...] = ()

    @property
    def all_programs(self) -> dict[str, Program]:
        """Programs and their variants, by name."""
        fewer = (program for variants in self.variants.values() for program in variants)
        return {**self.programs, **{program.name: program for program in fewer}}

    @cached_property
    def gathers(self) -> bool:
        """Whether ranks put parts of values together."""
        return any(op.kind == "all_gather" for program in self.programs.values() for op in program.ops)

    @property
    def loss(self) -> Value:
        return self.reported[0].step

    @property
    def eval_loss(self) -> Value:
        return self.reported[0].evaluation

    @property
    def calibrates(self) -> bool:
        """Whether the first optimizer steps of a fresh run have programs of their own."""
        return any(program.purpose == "calibrate" for program in self.programs.values())

    @property
    def readings(self) -> frozenset[Value]:
        """States that hold what the host reads of a step. No later step depends on them."""
        numerics = () if self.numerics is None else (self.numerics.values,)
        metrics = (state for metric in self.reported for state in (metric.step, metric.evaluation))
        refusals = (found.count for found in self.refusals)
        return frozenset((*metrics, *self.cached, self.grad_norm, *numerics, *refusals))

    def micro_step(self, *, first: bool, last: bool, purpose: Purpose = "train") -> Program:
        """Return the program of a micro-step of an optimizer step; see the fields of `Program`."""
        kind = MicroStep(first, last and self.world_size > 1)
        alike = (p for p in self.programs.values() if p.stage == "micro" and p.purpose == purpose)
        return next(p for p in alike if MicroStep(p.first, p.last) == kind)

    @cached_property
    def is_partial(self) -> bool:
        """Whether ops stand for others (`Op.times`): it has seconds and bytes, but cannot run."""
        return any(op.times > 1 for program in self.programs.values() for op in program.ops)

    def only(self, stage: Stage) -> Program:
        """Return the program named after its stage: "start", "derive", "evaluate" or "update"."""
        return next(p for p in self.programs.values() if p.stage == stage and p.name == stage)

    def for_documents(self, program: Program, documents: int) -> Program:
        """Return the variant of `program` for the fewest documents that still serves a batch of `documents`."""
        fewer = self.variants.get(program.name, ())
        return next((p for p in fewer if p.documents is not None and documents <= p.documents), program)

    @property
    def allocated(self) -> tuple[Value, ...]:
        """Declared values that have memory of their own: all but staged params, of which ranks keep parts at most."""
        staged = {param for part in self.staging for param in part.places}
        return tuple(v for v in self.declared if v.shard or v not in staged)

    @property
    def params(self) -> dict[str, Value]:
        """Params by name, without staged ones."""
        return {v.name: v for v in self.allocated if v.role == "param"}

    @property
    def n_params(self) -> int:
        """Elements of all weights."""
        return sum(v.whole_size for v in self.declared if v.role == "param")

    @property
    def n_trainable(self) -> int:
        """Elements of the weights that are trained."""
        return sum(v.whole_size for v in self.trainable)
