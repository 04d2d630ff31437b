"""From plan inputs to planned programs: plugins record programs, passes transform them. No torch.

    forward    the model's build, then the adapters, then fuse_adds
    micro      differentiate -> outputs -> dead_code -> fuse_adds
    evaluate   the forward program without ops for training alone
    start      masters from params
    derive     empty: a recipe that quantizes weights adds to it
    update     global norm, then the optimizer
    all        recipe.lower, which takes all of them at once and may add `calibrate` and `numerics` -> dead_code
               -> weight format, with frozen weights that are stored in one
    micro, calibrate and the micro-step of numerics
               -> adapters' fuse -> recompute
    all        offload, one strategy after another
    micro, calibrate and the micro-step of numerics
               -> accumulate: micro_first, micro_next
               -> reduce, with several workers: micro_last, or micro_only where it is also the first
               (of the micro-step of numerics only the first)
    derive     -> staged: a program of its own for the params of a block that nothing else reads
    micro, evaluate, update
               -> pending: copies of the states that micro-steps write and the update does not, if there are any
               micro and evaluate also in variants for batches of few documents
    all        stream: copies of the values that the host holds
    all        in_place, last

`verify` checks the result of every pass, those of `finish` once the plan is chosen. All programs share params,
gradients, states, inputs, and one arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..api import Family, Init, ParamInfo, WeightMap
from ..memory.plan import plan_family
from ..program.builder import Builder
from ..program.op import Program
from ..program.passes.fuse_adds import fuse_adds
from ..program.passes.in_place import in_place
from ..program.value import Value
from .assembly import Assembly
from .inputs import PlanInputs
from .pass_runner import PassRunner
from .recorder import Recorder, declare_batch, declare_scalars
from .resolve import resolve
from .staging import Staged, split_staged, staged_params
from .weight_maps import checked_weight_maps


@dataclass(frozen=True)
class RecordedPrograms:
    """The programs of a run before recomputation and offloading, from which any number of runs are finished.

    inputs of a run that is finished from it may differ in `recompute`, `recompute_chosen`, `offload` and `host_memory`
    from those that it was recorded from, as long as `grouping` is the same.

    states  what the optimizer declared
    stored  {frozen param: the states that hold it in the run's weight format}
    """

    recorder: Recorder
    family: Family
    params: Mapping[Value, ParamInfo]
    states: Sequence[Value]
    stored: Mapping[Value, Sequence[Value]]
    gradients: Mapping[Value, Value]
    weights: tuple[WeightMap, ...]
    loss: Value
    eval_loss: Value
    grad_norm: Value


@dataclass(frozen=True)
class FinishedPrograms:
    """The programs that run, before their memory is planned and without variants for fewer documents.

    micro   the micro-step before recomputation, gradient accumulation and reduction over workers
    host_places  {value: what takes its place on the host}
    copies  {state: its pending copy}
    """

    recorder: Recorder
    family: Family
    programs: Sequence[Program]
    micro: Program
    staging: Sequence[Staged]
    host_places: Mapping[Value, Value]
    copies: Mapping[Value, Value]

    @property
    def allocated(self) -> tuple[Value, ...]:
        """Declared values that have memory of their own: all but staged params."""
        elsewhere = {param for staged in self.staging for param in staged.places}
        return tuple(v for v in self.recorder.b.declared if v not in elsewhere)


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
    recorder = recording.recorder.forked(inputs)
    try:
        return _planned(finish(recording, recorder, inputs), recording, inputs)
    except Exception:
        recorder.passed.verify()  # the cause may be a program that an earlier pass has broken
        raise


def _planned(found: FinishedPrograms, recording: RecordedPrograms, inputs: PlanInputs) -> Assembly:
    recorder = found.recorder
    programs = {p.name: p for p in found.programs}
    cu_seqlens, variants = recorder.variants(found.programs)
    every = (*programs.values(), *(program for fewer in variants.values() for program in fewer))
    ops = dict.fromkeys(op for p in every for op in p.ops)  # programs share most of them
    kernels = resolve(ops, inputs.kernel_for, inputs.target, inputs.ops)
    return Assembly(
        programs=programs,
        variants=variants,
        cu_seqlens=cu_seqlens,
        declared=recorder.b.declared,
        staging=tuple(replace(staged, program=programs[staged.program.name]) for staged in found.staging),
        trainable=tuple(found.host_places.get(param, param) for param in recording.gradients),
        stored={
            param.name: tuple(found.host_places.get(state, state) for state in states)
            for param, states in recording.stored.items()
        },
        memory=plan_family(found.programs, found.allocated, kernels.workspace, variants),
        kernels=kernels,
        micro=found.micro,
        batch=recorder.batch,
        scalars=recorder.scalars,
        loss=recording.loss,
        eval_loss=recording.eval_loss,
        grad_norm=recording.grad_norm,
        weights=recording.weights,
        pending=tuple(found.copies.values()),
        passed=recorder.passed,
        world_size=inputs.world_size,
        numerics=found.family.numerics,
    )


def record(inputs: PlanInputs) -> RecordedPrograms:
    """Record the programs of a run up to recomputation. Raises like `assemble`."""
    b = Builder(inputs.ops, inputs.precision.model)
    recorder = Recorder(inputs, b, PassRunner(inputs.ops), declare_batch(b, inputs), declare_scalars(b))
    forward = recorder.build()
    weights = checked_weight_maps(inputs, b.declared)
    forward = recorder.adapt(forward, weights)
    forward = recorder.passed("fuse_adds", forward, fuse_adds(forward, inputs.ops))
    loss = forward.outputs[0]
    loss_state = b.state("step_loss", loss.shape, loss.dtype, Init(kind="zeros"), collects="sum")
    eval_state = b.state("eval_loss", loss.shape, loss.dtype, Init(kind="zeros"))
    norm = b.state("grad_norm", (), "fp32", Init(kind="zeros"))

    micro, gradients = recorder.differentiated(forward, loss_state, weights)
    params = recorder.params(forward, gradients, weights)
    family, states = recorder.family(micro, recorder.evaluation(forward, eval_state), params, norm)
    family, stored = recorder.stored(recorder.lowered(family, params), params)
    family = family.with_micro_steps(recorder.fused)
    return RecordedPrograms(recorder, family, params, states, stored, gradients, weights, loss_state, eval_state, norm)


def finish(recording: RecordedPrograms, recorder: Recorder, inputs: PlanInputs) -> FinishedPrograms:
    """Return the programs of a run that `recording` is of. Raises like `assemble`."""
    plain, b = recording.family.micro, recorder.b
    family = recording.family.with_micro_steps(recorder.recomputed)
    family, held = recorder.offloaded(family, recording.params, recording.states)
    steps = (recorder.accumulated(step, recording.gradients) for step in family.micro_steps())
    micro_steps = [program for programs in steps for program in programs]
    evaluate, update = family.evaluate, family.update
    readings = {recording.loss, recording.eval_loss, *((family.numerics.values,) if family.numerics else ())}
    copies = recorder.pending_copies(micro_steps, evaluate, update, frozenset(readings))
    if copies:
        micro_steps = [recorder.on_copies(program, copies, begins=program.first) for program in micro_steps]
        evaluate = recorder.on_copies(evaluate, copies, begins=True)
        update = recorder.committing(update, family.clip_coef, copies)
    derive, staging = split_staged(family.derive, staged_params(family, b.declared, recording.gradients))
    for staged in staging:
        recorder.passed("staged", family.derive, staged.program)

    unfinished, host_places = recorder.streamed(
        (family.start, derive, *(staged.program for staged in staging), *micro_steps, evaluate, update), held
    )
    finished = [recorder.passed("in_place", p, in_place(p, inputs.ops)) for p in unfinished]
    return FinishedPrograms(recorder, family, finished, plain, staging, host_places, copies)
