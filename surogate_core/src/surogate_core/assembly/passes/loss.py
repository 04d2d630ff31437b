"""The run's loss follows the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...api import Definition, Head, Init, LossContext, Metric
from ...errors import ConfigError
from ...front_end import called
from ...program.op import Program
from ...program.value import WEIGHT_LABEL, Value
from ..draft import Draft
from ..inputs import PlanInputs


def append_loss(draft: Draft) -> Draft:
    """Append the loss to the model's forward program. The outputs are its terms and the model's own losses.

    If it reads a reference, a value stands for the last hidden state of that (`with_reference`). A frozen reference
    reads copies of the params.
    """
    head, b, inputs = draft.head, draft.builder, draft.inputs
    assert head is not None
    definition, options, forward = inputs.loss, inputs.loss_options, draft.programs["forward"]
    x = Value("reference", head.x.shape, head.x.dtype, "input") if definition.reference(options) else None
    _refuse_reference(inputs, reads=x is not None)
    copies = _copies(draft, forward, head) if inputs.frozen_reference else {}
    reference = replace(head, x=x, weight=copies.get(head.weight, head.weight), losses=()) if x else None
    context = LossContext(builder=b, head=head, reference=reference, batch=draft.batch, options=options)
    with b.record("forward") as emitted:
        loss = definition.build(context)
    if definition.cached_reference and not loss.cached_reference:
        raise definition.failed("build", "returned no cached_reference, the numbers of that column of LossDef")
    outputs = (*(term.value for term in loss.terms), *head.losses)
    after = replace(forward, ops=(*forward.ops, *emitted), outputs=outputs)
    after = draft.verified(forward, after, (definition, "build"))
    first, *others = (*loss.terms, *loss.metrics, *head.metrics)
    _refuse_same_names([(definition, (*loss.terms[1:], *loss.metrics)), (inputs.model, head.metrics)])
    return replace(
        draft.having(after),
        metrics=(replace(first, name="loss"), *others),
        stand_in=x,
        copies=copies,
        cached_reference=loss.cached_reference if definition.cached_reference else None,
    )


def _refuse_reference(inputs: PlanInputs, *, reads: bool) -> None:
    """Raise ConfigError if a loss that `reads` a reference has none, or if there is one that is not read."""
    frozen, adapts, name = inputs.frozen_reference, bool(inputs.adapters), inputs.loss.name
    if frozen and ((adapts and not inputs.other_reference) or not reads):
        why = "an adapter leaves the model as it is" if adapts and reads else f"loss: {name} reads no reference"
        raise ConfigError(f"{called('frozen_reference')} would copy the weights, but {why}. Leave it out.")
    if reads and not (adapts or frozen):
        raise ConfigError(
            f"loss: {name} compares with the model as it is without the adapter, but this run trains no "
            f"adapter. Set {called('adapters')}, or {called('reference', 'frozen_reference')}, or choose another loss."
        )


def _copies(draft: Draft, model: Program, head: Head) -> Mapping[Value, Value]:
    """Declare a copy of each param that the model reads and that training changes; of other weights, of each."""
    b, other = draft.builder, draft.inputs.other_reference
    same = set() if other else {m.param for m in draft.weights if not m.trained}
    init = Init(kind="zeros") if other else None
    read = dict.fromkeys((*(v for op in model.ops for v in op.ins if v.role == "param"), head.weight))
    changing = [v for v in read if v.name not in same]
    return {v: b.state(f"reference.{v.name}", v.shape, v.dtype, init, label=WEIGHT_LABEL) for v in changing}


def _refuse_same_names(metrics: Sequence[tuple[Definition, Sequence[Metric]]]) -> None:
    taken = {"loss": "what is minimised"}
    for definition, name in ((definition, metric.name) for definition, some in metrics for metric in some):
        if name in taken:
            raise definition.failed("build", f"its metric {name} has the name of {taken[name]}. Rename one")
        taken[name] = f"a metric of {definition.origin}"
