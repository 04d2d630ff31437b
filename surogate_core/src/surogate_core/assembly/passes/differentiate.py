"""The backward rule of every op follows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...errors import ConfigError, DisconnectedError
from ...origin import blaming
from ...program.differentiate import differentiate
from ...program.op import Program
from ...program.value import Value
from ..draft import Draft
from .adapter import refuse_layouts


def append_backward(draft: Draft) -> Draft:
    """Make the program of a micro-step: the forward program, then the gradients of its outputs' sum.

    Adapters choose what is trained; without them all params are but those that the model never trains. Raises
    ConfigError if the reference would be.
    """
    inputs, forward = draft.inputs, draft.programs["forward"]
    of_model = {m.param: m for m in draft.weights}

    def trainable(param: Value) -> bool:
        stored = of_model.get(param.name)
        if stored is not None and not stored.trained:
            return False
        return not inputs.adapters or any(adapter.trainable(param, stored, o) for adapter, o in inputs.adapters)

    before = Program("micro", forward.ops, forward.outputs, stage="micro")
    try:
        program, gradients = differentiate(
            before, before.outputs, draft.builder, trainable, inputs.precision.param_grad
        )
    except DisconnectedError as error:
        # The fault of the rule that gave no gradient, else of the plugin that recorded the forward program last.
        last, function = (inputs.adapters[-1][0], "trainable") if inputs.adapters else (inputs.model, "build")
        if inputs.adapters and {v.name for v in forward.values() if v.role == "param"} <= of_model.keys():
            function = "apply or trainable"  # neither adds a param nor trains one
        rule = inputs.ops[error.cut_by].origin if error.cut_by else None
        with blaming(rule or last.origin, "vjp" if rule else function):
            raise error
    for adapter, _ in inputs.adapters:
        refuse_layouts(adapter.name, {v.name for v in gradients}, draft.weights, trained=True)
    draft = replace(draft.having(draft.verified(forward, program)), gradients=gradients)
    _refuse_trained_reference(inputs.loss.name, forward, gradients)
    return draft


def _refuse_trained_reference(loss: str, forward: Program, trained: Collection[Value]) -> None:
    """Raise ConfigError if the model without its adapter changes, because some of its own params are trained."""
    read = {value for op in forward.ops if op.phase == "reference" for value in op.ins}
    if changed := [param.name for param in trained if param in read]:
        raise ConfigError(
            f"loss: {loss} compares with the model as it is without the adapter, but this run "
            f"trains params of the model itself: {', '.join(changed[:3])}. Let the adapter train none."
        )
