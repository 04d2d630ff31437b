"""The programs that are compared: the run's own without dropout, and the same model without the recipe's rounding."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from surogate.runs.run import Run
from surogate_core.api import AdapterDef, LowerContext, Precision, Program, Programs
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_core.program.passes.evaluation import for_evaluation


class Subject(NamedTuple):
    """A run and the plan of the micro-step that is compared."""

    run: Run
    plan: Plan


EXACT: Final = Precision(**{field.name: "fp32" for field in fields(Precision)})


def without_dropout(inputs: PlanInputs, left_out: set[str]) -> PlanInputs:
    """Return inputs whose adapters have no training-only ops, as in an evaluation, and do not start their params.

    With dropout the two sides could not be compared, because each draws its own mask. The kinds of ops that are removed
    are added to `left_out`.
    """

    def evaluated(adapter: AdapterDef) -> AdapterDef:
        def apply(*args: Any) -> Program:
            program: Program = adapter.apply(*args)
            left_out.update(op.kind for op in program.ops if inputs.ops[op.kind].training_only)
            return replace(for_evaluation(program, inputs.ops), name=program.name, stage=program.stage)

        return replace(adapter, apply=apply, start=None)

    return replace(inputs, adapters=[(evaluated(adapter), options) for adapter, options in inputs.adapters])


def in_fp32(inputs: PlanInputs) -> PlanInputs:
    """Return inputs for the same model and adapters in fp32, without the recipe's rewrite and without dropout."""

    def unchanged(programs: Programs, context: LowerContext) -> Programs:
        return programs

    exact = replace(inputs.recipe, lower=unchanged)
    return replace(without_dropout(inputs, set()), precision=EXACT, recipe=exact, lowering=None)


def computes_in_fp32(inputs: PlanInputs) -> bool:
    p = inputs.precision
    return {p.model, p.matmul, p.gradient, p.param_grad, *([p.adapter] if inputs.adapters else [])} == {"fp32"}


def in_plain_torch(exact: Plan) -> str:
    """Return a line about the ops that the comparison in fp32 runs in plain torch on a GPU, or "" if there are none."""
    kinds = exact.kernels.in_torch
    if not kinds:
        return ""
    return (
        f"the comparison in fp32 runs {', '.join(kinds)} in plain torch on the GPU: they have no compiled kernel for "
        "fp32. It takes longer for that, and its errors may differ in their last digits when it is repeated. The run "
        "itself, and its comparison, are not affected."
    )


def refuse_training_only(subject: Subject) -> None:
    """Raise ConfigError if the model itself has training-only ops: they are off in transformers, but not in ours."""
    ops = subject.plan.inputs.ops
    kept = [op.kind for op in subject.plan.assembly.micro_step(first=True, last=True).ops if ops[op.kind].training_only]
    if kept:
        raise ConfigError(
            f"model: {subject.plan.inputs.model.name} has {kept[0]}, a training-only op that cannot be left out of "
            "a comparison with transformers. Verify the model with a config that turns it off."
        )
