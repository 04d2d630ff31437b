"""From plan inputs to planned programs: plugins record programs, passes transform them. No torch.

`passes.PASSES` is the order of the passes. `record` runs those up to recomputation, `_finished` the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ..api import Definition, Init, Metric, ParamInfo, Programs, WeightMap
from ..memory.plan import plan_programs
from ..program.builder import Builder
from ..program.op import Program
from ..program.passes.fuse_adds import fuse_adds
from ..program.passes.in_place import in_place
from ..program.value import Value
from .assembly import Assembly, Reported
from .finisher import Finisher
from .inputs import PlanInputs
from .pass_runner import PassRunner
from .recorder import Recorder
from .resolve import resolve
from .staging import split_staged, staged_params
from .step_inputs import declare_batch, declare_scalars
from .weight_maps import checked_weight_maps


@dataclass(frozen=True)
class RecordedPrograms:
    """The programs of a run before recomputation and offloading, from which any number of runs are finished.

    inputs of a run that is finished from it may differ in `recompute`, `recompute_chosen`, `offload` and `host_memory`
    from those that it was recorded from, as long as `grouping` is the same.

    states  what the optimizer declared
    adapter_start
            what adapters compute of the loaded weights
    stored  {frozen param: the states that hold it in the run's weight format}
    recompute_levels  {parts recomputed in any case: the recomputation to choose from}, of runs planned so far
    """

    recorder: Recorder
    programs: Programs
    params: Mapping[Value, ParamInfo]
    states: Sequence[Value]
    adapter_start: Program | None
    stored: Mapping[Value, Sequence[Value]]
    gradients: Mapping[Value, Value]
    weights: tuple[WeightMap, ...]
    reported: tuple[Reported, ...]
    grad_norm: Value
    cached: tuple[Value, ...]
    recompute_levels: dict[frozenset[str], Any] = field(default_factory=dict)


def assemble(inputs: PlanInputs, recording: RecordedPrograms | None = None) -> Assembly:
    """Record, transform, verify and plan every program of a run; or only finish what is recorded.

    Raises ConfigError for sizes that do not fit together, and ProgramError if a plugin emits a program that breaks the
    rules. Needs neither torch nor a device. Takes about a second for the largest dense models.
    """
    assembly = draft(inputs, recording or record(inputs))
    assembly.passed.verify()
    return assembly


def draft(inputs: PlanInputs, recording: RecordedPrograms) -> Assembly:
    """Return the assembly of a run that `recording` is of, without the last checks. Raises like `assemble`."""
    finisher = recording.recorder.forked(inputs)
    with finisher.passed.finding_causes():
        return _finished(recording, finisher, inputs)


def _finished(recording: RecordedPrograms, finisher: Finisher, inputs: PlanInputs) -> Assembly:
    b = finisher.b
    programs = recording.programs.with_micro_steps(finisher.recomputed)
    programs, on_host = finisher.offloaded(programs, recording.params, recording.states)
    scatter = finisher.scattering(recording.params)
    steps = (
        finisher.accumulated(step, recording.gradients, recording.params, scatter) for step in programs.micro_steps()
    )
    micro_steps = [program for step in steps for program in step]
    readings = {state for metric in recording.reported for state in (metric.step, metric.evaluation)}
    readings |= {*recording.cached, *([programs.numerics.values] if programs.numerics else ())}
    micro_steps, evaluate, update, copies = finisher.pending(micro_steps, programs, frozenset(readings))
    update, micro_steps, gather = finisher.gathered_late(update, micro_steps, on_host)
    beginning = () if recording.adapter_start is None else (recording.adapter_start,)
    derive, staging = split_staged(programs.derive, staged_params(programs, b.declared, recording.gradients, beginning))
    for program in (derive, *(staged.program for staged in staging)) if staging else ():
        finisher.passed("staged", programs.derive, program)
    staged = (one.program for one in staging)
    whole = (*beginning, programs.start, derive, *staged, *micro_steps, evaluate, update, *gather)
    divided, loading, parts = finisher.divided(whole, staging, recording.params)
    staging = (*staging, *loading)
    unfinished, host_places = finisher.streamed(divided, [parts.get(value, value) for value in on_host])
    places = {whole: host_places.get(part, part) for whole, part in parts.items()} | host_places
    finished = {p.name: finisher.passed("in_place", p, in_place(p, inputs.ops)) for p in unfinished}
    cu_seqlens, variants = finisher.variants(tuple(finished.values()))
    elsewhere = {param for staged in staging for param in staged.places if param.shard is None}
    allocated = [v for v in b.declared if v not in elsewhere]
    every = (*finished.values(), *chain.from_iterable(variants.values()))
    ops = dict.fromkeys(chain.from_iterable(p.ops for p in every))  # programs share most of them
    kernels = resolve(ops, inputs.kernel_for, inputs.target, inputs.ops)
    return Assembly(
        programs=finished,
        variants=variants,
        cu_seqlens=cu_seqlens,
        declared=b.declared,
        staging=tuple(replace(staged, program=finished[staged.program.name]) for staged in staging),
        trainable=tuple(places.get(param, param) for param in recording.gradients),
        stored={
            param.name: tuple(places.get(state, state) for state in states)
            for param, states in recording.stored.items()
        },
        memory=plan_programs(finished.values(), allocated, kernels.workspace, variants),
        kernels=kernels,
        micro=recording.programs.micro,
        batch=finisher.batch,
        scalars=finisher.scalars,
        reported=recording.reported,
        grad_norm=recording.grad_norm,
        weights=recording.weights,
        pending=tuple(copies.values()),
        passed=finisher.passed,
        world_size=inputs.world_size,
        numerics=programs.numerics,
        cached=recording.cached,
    )


def trace(inputs: PlanInputs) -> Assembly:
    """Return what `assemble` returns, with the programs of every pass (`Pass.programs`)."""
    return assemble(inputs, record(inputs, keeps=True))


def record(inputs: PlanInputs, *, keeps: bool = False) -> RecordedPrograms:
    """Record the programs of a run up to recomputation, without the last checks. Raises like `assemble`."""
    passed = PassRunner(inputs.ops, keeps=keeps)
    with passed.finding_causes():
        return _recorded(inputs, passed)


def _recorded(inputs: PlanInputs, passed: PassRunner) -> RecordedPrograms:
    b = Builder(inputs.ops, inputs.precision.model, inputs.sharding.parts if inputs.sharding.states else 1)
    recorder = Recorder(inputs, b, passed, declare_batch(b, inputs), declare_scalars(b, inputs))
    model, head = recorder.build()
    weights = checked_weight_maps(inputs, b.declared, b.stack_of)
    forward, loss, stand_in, copies = recorder.loss(model, head)
    forward = recorder.adapt(forward, weights)
    forward = recorder.with_reference(forward, model, stand_in, copies) if stand_in else forward
    forward = recorder.passed("fuse_adds", forward, fuse_adds(forward, inputs.ops))
    first, *others = (*loss.terms, *loss.metrics, *head.metrics)
    _refuse_same_names([(inputs.loss, (*loss.terms[1:], *loss.metrics)), (inputs.model, head.metrics)])
    totals, evaluated = dict[Value, Value](), dict[Value, Value]()
    reported = tuple(_reported(b, one, totals, evaluated) for one in (replace(first, name="loss"), *others))
    kept = (loss.cached_reference,) if inputs.loss.cached_reference and loss.cached_reference else ()
    cached = tuple(b.state("cached_reference", v.shape, v.dtype, Init(kind="zeros")) for v in kept)
    evaluated |= zip(kept, cached, strict=True)
    norm = b.state("grad_norm", (), "fp32", Init(kind="zeros"))

    micro, gradients = recorder.differentiated(forward, totals, weights)
    recorder.refuse_trained_reference(forward, gradients)
    params = recorder.params(forward, gradients, weights)
    programs, states = recorder.programs(micro, recorder.evaluation(forward, evaluated), params, copies, norm)
    programs, storage = recorder.lowered(programs, params)
    programs = programs.with_micro_steps(recorder.fused)
    started, stored = recorder.adapter_start(weights, storage), {} if storage is None else storage.states
    read = (weights, reported, norm, cached)
    return RecordedPrograms(recorder, programs, params, states, started, stored, gradients, *read)


def _refuse_same_names(metrics: Sequence[tuple[Definition, Sequence[Metric]]]) -> None:
    taken = {"loss": "what is minimised"}
    for definition, name in ((definition, metric.name) for definition, some in metrics for metric in some):
        if name in taken:
            raise definition.failed("build", f"its metric {name} has the name of {taken[name]}. Rename one")
        taken[name] = f"a metric of {definition.origin}"


def _reported(b: Builder, metric: Metric, totals: dict[Value, Value], evaluated: dict[Value, Value]) -> Reported:
    """Return a metric, with states of its value in `totals` and `evaluated`, which other metrics may have added."""
    value, zero = metric.value, Init(kind="zeros")
    if value not in totals:
        totals[value] = b.state(f"step_{metric.name}", value.shape, value.dtype, zero, collects="sum")
        evaluated[value] = b.state(f"eval_{metric.name}", value.shape, value.dtype, zero)
    return Reported(metric.name, metric.per, totals[value], evaluated[value], metric.of)
