"""The program of an optimizer step: the norm of all gradients, then the update of each group of params."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..api import ParamGrad, ParamInfo, Scalars, UpdateContext
from ..errors import ProgramError
from ..origin import blaming
from ..program.builder import Builder
from ..program.op import Program
from ..program.value import Value
from .inputs import PlanInputs


@dataclass(frozen=True)
class Update:
    """A recorded update. measured: the params whose `amax` it writes. states: what the optimizer declared."""

    program: Program
    clip_coef: Value
    measured: Sequence[ParamGrad]
    states: Sequence[Value]


def record_update(b: Builder, inputs: PlanInputs, scalars: Scalars, params: Iterable[ParamInfo], norm: Value) -> Update:
    """Record the gradient norm and the optimizer over the trained params.

    Raises ProgramError if the optimizer leaves a master or a work copy unwritten, writes one without `clip_coef`, or
    reads a state that nothing has set.
    """
    with b.record("update"):
        coef = b.activation("clip_coef", (), "fp32")
        trained = [_param_grad(b, inputs, info) for info in params if info.grad is not None]
        b.emit("global_norm", *(p.grad for p in trained), outs=[norm, coef], max_norm=inputs.max_grad_norm)
        before = len(b.declared)
        for group in inputs.grouping(trained):
            context = UpdateContext(
                builder=b,
                params=group,
                clip_coef=coef,
                scalars=scalars,
                precision=inputs.precision,
                weight_decay=inputs.weight_decay,
                options=inputs.optimizer_options,
            )
            with b.block(_block(group)):
                inputs.optimizer.update(context)
        states = b.declared[before:]
        program = b.program("update", (norm,), stage="update")
    written = {v for op in program.ops for v in op.written}
    with blaming(inputs.optimizer.origin, "update"):
        _check_complete(inputs, trained, written)
        _check_skipped_steps(inputs, trained, program, coef)
    return Update(program, coef, [p for p in trained if p.amax in written], states)


def _block(group: Sequence[ParamGrad]) -> int:
    """Return the block of all params of a group; -1 if they are of several."""
    first, *others = {p.param.block for p in group}
    return -1 if others else first


def _param_grad(b: Builder, inputs: PlanInputs, info: ParamInfo) -> ParamGrad:
    assert info.grad is not None and info.master is not None
    reads_amax = inputs.lowering is None and inputs.recipe.reads_amax(info, inputs.precision, inputs.recipe_options)
    return ParamGrad(
        param=info.param,
        grad=info.grad,
        master=info.master,
        stored=info.stored,
        kind=info.kind,
        matrices=info.matrices,
        amax=b.activation("amax", (), "fp32") if reads_amax else None,
    )


def _check_complete(inputs: PlanInputs, trained: Sequence[ParamGrad], written: Collection[Value]) -> None:
    forgotten = [v.name for p in trained for v in dict.fromkeys((p.master, p.param)) if v not in written]
    if forgotten:
        raise ProgramError(f"optimizer {inputs.optimizer.name} never writes: {', '.join(forgotten)}")


def _check_skipped_steps(inputs: PlanInputs, trained: Sequence[ParamGrad], program: Program, coef: Value) -> None:
    """Check that ops that write weights know of `coef`, directly or by what is made of it: else none can be skipped."""
    weights = {v for p in trained for v in (p.master, p.param)}
    known = {coef}
    for op in program.ops:
        if not known.isdisjoint(op.ins):
            known.update(op.written)
        elif blind := sorted(v.name for v in op.written if v in weights):
            raise ProgramError(
                f"optimizer {inputs.optimizer.name}: {op.kind} ({op.where}) writes {blind[0]} without clip_coef: the "
                "gradient is not clipped, and a step whose gradient is not finite is not skipped"
            )
