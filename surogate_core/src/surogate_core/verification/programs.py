"""The programs that are compared: the run's own without dropout, and the same model without the recipe's rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from ..api import AdapterDef, OpDef, Precision, Program
from ..errors import ConfigError
from ..planning.inputs import PlanInputs
from ..program.passes.evaluation import for_evaluation
from .subject import Subject

EXACT: Final = Precision(
    model="fp32",
    matmul="fp32",
    gradient="fp32",
    master="fp32",
    adapter="fp32",
    param_grad="fp32",
    optimizer_state="fp32",
)


class WithoutDropout:
    """Leaves out of an adapter's program the ops for training alone, as an evaluation does.

    With dropout the two sides could not be compared: each draws its own elements. left_out: the kinds of ops.
    """

    def __init__(self) -> None:
        self.left_out: set[str] = set()

    def __call__(self, given: PlanInputs) -> PlanInputs:
        adapters = [(self._evaluated(adapter, given.ops), options) for adapter, options in given.adapters]
        return replace(given, adapters=adapters)

    def _evaluated(self, adapter: AdapterDef, ops: Mapping[str, OpDef]) -> AdapterDef:
        apply: Callable[..., Program] = adapter.apply

        def apply_evaluated(*args: Any) -> Program:
            program = apply(*args)
            self.left_out |= {op.kind for op in program.ops if ops[op.kind].training_only}
            return replace(for_evaluation(program, ops), name=program.name)

        return replace(adapter, apply=apply_evaluated)


def in_fp32(given: PlanInputs) -> PlanInputs:
    """The same model and adapters in fp32 without the recipe's rewrite, and without dropout."""

    def unchanged(program: Program, *others: Any) -> Program:
        return program

    return replace(WithoutDropout()(given), precision=EXACT, recipe=replace(given.recipe, lower=unchanged))


def computes_in_fp32(given: PlanInputs) -> bool:
    """Whether weights, products and gradients all are fp32."""
    p = given.precision
    return {p.model, p.matmul, p.gradient, p.param_grad, *([p.adapter] if given.adapters else [])} == {"fp32"}


def refuse_training_only(subject: Subject) -> None:
    """ConfigError if the model itself has ops for training alone: transformers' are off, ours would not be."""
    ops = subject.plan.inputs.ops
    kept = [op.kind for op in subject.plan.assembly.micro_step(first=True, last=True).ops if ops[op.kind].training_only]
    if kept:
        raise ConfigError(
            f"model: {subject.plan.inputs.model.name} has {kept[0]}, which is for training alone and cannot be left "
            "out of a comparison with transformers. Verify it with a config that turns it off."
        )
