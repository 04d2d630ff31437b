"""From plan inputs to planned programs: plugins record programs, passes transform them. No torch.

    forward    the model's build, then the adapters, then fuse_adds
    micro      differentiate -> outputs -> dead_code -> fuse_adds
    evaluate   the forward program without ops for training alone
    start      masters from params
    derive     empty: a recipe that quantizes weights adds to it
    update     global norm, then the optimizer
    all        recipe.lower, which takes all of them at once and may add `calibrate` and `numerics` -> dead_code
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

`verify` checks the result of every pass. All programs share params, gradients, states, inputs, and one arena.
"""

from __future__ import annotations

from dataclasses import replace

from ..api import Init
from ..memory.plan import plan_family
from ..program.builder import Builder
from ..program.passes.fuse_adds import fuse_adds
from ..program.passes.in_place import in_place
from .assembly import Assembly
from .inputs import PlanInputs
from .pass_runner import PassRunner
from .recorder import Recorder, declare_batch, declare_scalars
from .resolve import resolve
from .staging import split_staged, staged_params
from .weight_maps import checked_weight_maps


def assemble(inputs: PlanInputs) -> Assembly:
    """Record, transform, verify and plan every program of a run.

    Raises ConfigError for sizes that do not fit together, and ProgramError if a plugin emits a program that breaks the
    rules. Needs neither torch nor a device. Takes about a second for the largest dense models.
    """
    b = Builder(inputs.ops, inputs.precision.model)
    recorder = Recorder(inputs, b, PassRunner(inputs.ops), declare_batch(b, inputs), declare_scalars(b))
    forward, loss = recorder.build()
    weights = checked_weight_maps(inputs, b.declared)
    forward, loss = recorder.adapt(forward, loss, weights)
    forward = recorder.passed("fuse_adds", forward, fuse_adds(forward, inputs.ops))
    loss_state = b.state("step_loss", loss.shape, loss.dtype, Init(kind="zeros"), collects="sum")
    eval_state = b.state("eval_loss", loss.shape, loss.dtype, Init(kind="zeros"))
    norm = b.state("grad_norm", (), "fp32", Init(kind="zeros"))

    micro, gradients = recorder.differentiated(forward, loss, loss_state, weights)
    params = recorder.params(forward, gradients, weights)
    family, states = recorder.family(micro, recorder.evaluation(forward, eval_state), params, norm)
    family = recorder.lowered(family, params)

    family = family.with_micro_steps(recorder.fused)
    plain = family.micro
    family, held = recorder.offloaded(family.with_micro_steps(recorder.recomputed), params, states)
    micro_steps = [program for step in family.micro_steps() for program in recorder.accumulated(step, gradients)]
    evaluate, update = family.evaluate, family.update
    readings = {loss_state, eval_state, *((family.numerics.values,) if family.numerics else ())}
    copies = recorder.pending_copies(micro_steps, evaluate, update, frozenset(readings))
    if copies:
        micro_steps = [recorder.on_copies(program, copies, begins=program.first) for program in micro_steps]
        evaluate = recorder.on_copies(evaluate, copies, begins=True)
        update = recorder.committing(update, family.clip_coef, copies)
    derive, staging = split_staged(family.derive, staged_params(family, b.declared, gradients))
    for staged in staging:
        recorder.passed("staged", family.derive, staged.program)

    unfinished, hosted = recorder.streamed(
        (family.start, derive, *(staged.program for staged in staging), *micro_steps, evaluate, update), held
    )
    finished = [recorder.passed("in_place", p, in_place(p, inputs.ops)) for p in unfinished]
    programs = {p.name: p for p in finished}
    cu_seqlens, variants = recorder.variants(finished)
    every = (*programs.values(), *(program for fewer in variants.values() for program in fewer))
    kernels = resolve((op for p in every for op in p.ops), inputs.kernel_for, inputs.target, inputs.ops)
    elsewhere = {param for staged in staging for param in staged.places}
    resident = tuple(v for v in b.declared if v not in elsewhere)
    return Assembly(
        programs=programs,
        variants=variants,
        cu_seqlens=cu_seqlens,
        declared=b.declared,
        staging=tuple(replace(staged, program=programs[staged.program.name]) for staged in staging),
        trainable=tuple(hosted.get(param, param) for param in gradients),
        memory=plan_family(programs.values(), resident, kernels.workspace, variants),
        kernels=kernels,
        micro=plain,
        batch=recorder.batch,
        scalars=recorder.scalars,
        loss=loss_state,
        eval_loss=eval_state,
        grad_norm=norm,
        weights=weights,
        pending=tuple(copies.values()),
        passes=tuple(recorder.passed.passes),
        world_size=inputs.world_size,
        numerics=family.numerics,
    )
