"""Every param is described: its kind, its matrices, its gradient, its master, and the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...api import ParamInfo
from ...dtypes import wider
from ...program.value import Value
from ..draft import Draft
from ..parts import assigned, divided, elements_together, with_master
from ..weight_maps import logical_matrices, param_kind, special_kinds
from .optimizer import update_flops


def describe_params(draft: Draft) -> Draft:
    """Describe every param, and declare the masters of the trained ones.

    `master_dtype` applies to the model's own weights of its dtype. An adapter's params, and those that the model
    declares in another dtype, have the one that they are trained in, so a wider master may gain something and a
    narrower one would only lose precision.
    """
    inputs, b, gradients = draft.inputs, draft.builder, draft.gradients
    asked, stored = inputs.precision.master, {m.param: m for m in draft.weights}
    special, precise = (
        special_kinds(draft.programs["forward"], inputs.ops),
        {m.param for m in draft.weights if m.precise},
    )
    found = {
        param: ParamInfo(
            param=param,
            of_model=param.name in stored and not stored[param.name].new,
            kind=special.get(param) or param_kind(param, stored.get(param.name)),
            matrices=logical_matrices(param, stored.get(param.name), b.stack_of(param)),
            grad=gradients.get(param),
            precise=param.name in precise,
            parameter=stored[param.name].parameter if param.name in stored else "",
        )
        for param in b.declared
        if param.role == "param"
    }
    trained = [info for info in found.values() if info.grad is not None]
    together = {info.param: elements_together(info, inputs) for info in trained}
    owners = _owners(draft, [info for info in trained if together[info.param] == info.param.size])
    for info in trained:
        of_run = info.of_model and info.param.dtype == inputs.precision.model
        dtype = asked if of_run else wider(info.param.dtype, asked)
        if together[info.param]:
            info = divided(info, inputs.sharding, b, owners.get(info.param))
        found[info.param] = with_master(info, dtype, b)
    return replace(draft, params=found)


def _owners(draft: Draft, whole: Sequence[ParamInfo]) -> dict[Value, int]:
    """Return {param: the rank that updates it}. What the update of a param takes depends on its shapes alone."""
    flops: dict[tuple[object, ...], int] = {}

    def work(info: ParamInfo) -> int:
        form = (info.param.form, *(matrix.rows for matrix in info.matrices))
        if form not in flops:
            alone = replace(draft, builder=draft.builder.forked())
            flops[form] = update_flops(alone, with_master(info, info.param.dtype, alone.builder))
        return flops[form]

    return assigned(whole, work, draft.inputs.sharding.parts)
