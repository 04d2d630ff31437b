"""The optimizer records the program of a step: the norm of all gradients, then the update of each group of params."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from ...api import ParamInfo, TrainedParam, UpdateContext
from ...errors import ProgramError
from ...origin import blaming
from ...program.builder import Builder
from ...program.op import Program
from ...program.shards import chunk_size, part_of
from ...program.value import Value
from ..draft import Draft
from ..inputs import PlanInputs, by_block
from ..parts import as_parts, gather_updated, owned

Factors = Mapping[str, float]
"""{name of a param: factor of its learning rate}; 1 for the others."""


def record_update(draft: Draft) -> Draft:
    """Record the gradient norm and the optimizer over the trained params; see which magnitudes it computes.

    Raises ProgramError if the optimizer leaves a master or a work copy unwritten, writes one without `clip_coef`, or
    reads a state that nothing has set.
    """
    draft, factors = _declare_rates(draft)
    b, inputs, norm = draft.builder, draft.inputs, draft.grad_norm
    assert norm is not None
    infos = {info.param.name: info for info in draft.params.values() if info.grad is not None}
    with b.record("update") as ops:
        coef = b.activation("clip_coef", (), "fp32")
        trained = [_param_grad(draft, info) for info in infos.values()]
        gradients = [(info.grad, info.grad_part or info.grad) for info in infos.values() if info.grad is not None]
        emit_norm(b, gradients, [norm, coef], ranks=inputs.sharding.parts, max_norm=inputs.max_grad_norm)
        in_part, owned_by = _by_owner(trained)
        wholes = _states_of_wholes(draft, (infos[p.name] for p in in_part), coef, factors)
        before = len(b.declared)
        for group in inputs.grouping(in_part) if in_part else ():
            with b.block(_block(group)):
                _emit_update(draft, group, coef, factors)
                gather_updated((infos[p.name] for p in group), inputs.sharding, b)
        states = b.declared[before:]
        own: dict[Value, Value] = {}
        for owner, of_owner in owned_by.items():
            own |= _emit_owned(draft, of_owner, owner, coef, factors)
        for group in by_block([p for own_params in owned_by.values() for p in own_params]):
            with b.block(_block(group)):
                gather_updated((infos[p.name] for p in group), inputs.sharding, b)
        written = {v for op in ops for v in op.written}
        of_parts = [p.amax for p in trained if p.amax is not None and p.param.shard]
        b.forget(amax for amax in of_parts if amax not in written)
        if found := [amax for amax in of_parts if amax in written]:  # they become those of the whole params
            b.emit("all_reduce", *found, outs=found, lane="comm", world_size=inputs.sharding.parts, how="max")
        program = b.program("update", (norm,), stage="update")
    with blaming(inputs.optimizer.origin, "update"):
        weights = dict.fromkeys(v for p in trained for v in (p.master, p.param))
        if forgotten := [v.name for v in weights if v not in written]:
            raise ProgramError(f"optimizer {inputs.optimizer.name} never writes: {', '.join(forgotten)}")
        _check_skipped_steps(inputs, weights, program, coef)
        parts = as_parts(states, wholes, inputs.sharding.parts) if wholes is not None else {}
    parts |= own
    if parts:
        b.redeclare(parts)
        program = program.on(parts)
    states = (*states, *(value for value in own if value.role == "state"))
    return replace(
        draft.having(draft.verified(None, program, (inputs.optimizer, "update"))),
        clip_coef=coef,
        states=[parts.get(state, state) for state in states],
        params=_measured(draft.params, [p for p in trained if p.amax in written]),
    )


def _measured(params: Mapping[Value, ParamInfo], trained: Iterable[TrainedParam]) -> Mapping[Value, ParamInfo]:
    """Return what is known of params, with the largest magnitudes that the update writes of some."""
    whole = {p.param.inside or p.param: p for p in trained}
    return dict(params) | {param: replace(params[param], amax=p.amax) for param, p in whole.items()}


def update_flops(draft: Draft, info: ParamInfo) -> int:
    """Return the floating-point operations of the update of a param, which is recorded with the draft's builder."""
    b, inputs = draft.builder, draft.inputs
    with b.record("update") as ops:
        coef = b.activation("clip_coef", (), "fp32")
        inputs.optimizer.update(_context(draft, [_param_grad(draft, info)], coef))
    return sum(inputs.ops[op.kind].flops(op) for op in ops)


def _emit_owned(
    draft: Draft, params: Sequence[TrainedParam], owner: int, coef: Value, factors: Factors
) -> dict[Value, Value]:
    """Emit the update of params that one rank owns. Return {what the optimizer declared or made: as the owner's}."""
    b, inputs = draft.builder, draft.inputs
    found: dict[Value, Value] = {}
    for group in inputs.grouping_of_owners(params):
        first = len(b.declared)
        with b.record("update", _block(group)) as ops:
            _emit_update(draft, group, coef, factors)
        made = (v for op in ops for v in op.outs if v.role == "act")
        found |= owned((*b.declared[first:], *made), owner, inputs.sharding.parts)
        for op in ops:
            b.append(op)
    return found


def _by_owner(params: Sequence[TrainedParam]) -> tuple[list[TrainedParam], dict[int, list[TrainedParam]]]:
    """Return the params without owners, and those of each owner, in order of rank."""
    found: dict[int | None, list[TrainedParam]] = {None: []}
    for p in params:
        found.setdefault(p.param.owner, []).append(p)
    return found[None], {owner: found[owner] for owner in sorted(o for o in found if o is not None)}


def _declare_rates(draft: Draft) -> tuple[Draft, Factors]:
    """Return {name of a param: factor of its learning rate} of those that an adapter trains at another rate.

    Declares an input for each factor. Raises ProgramError for a factor that is not positive and finite.
    """
    inputs, of_model = draft.inputs, {m.param: m for m in draft.weights}
    found: dict[str, float] = {}
    for param in draft.gradients:
        stored = of_model.get(param.name)
        for adapter, options in inputs.adapters:
            if adapter.trainable(param, stored, options):
                factor = adapter.rate(param, stored, options)
                if not 0 < factor < inf:
                    with blaming(adapter.origin, "rate"):
                        raise ProgramError(f"adapter {adapter.name}: rate of {param.name} is {factor}, not positive")
                found |= {} if factor == 1 else {param.name: factor}
    rates = {factor: draft.builder.input(f"lr.{factor:g}", (), "fp32") for factor in dict.fromkeys(found.values())}
    return replace(draft, scalars=replace(draft.scalars, rates=rates)) if rates else draft, found


def _emit_update(draft: Draft, group: Sequence[TrainedParam], coef: Value, factors: Factors) -> None:
    """Emit the update of a group: of its params of one rate together, in order of their first params."""
    by_factor: dict[float, list[TrainedParam]] = {}
    for p in group:
        by_factor.setdefault(factors.get(p.name, 1.0), []).append(p)
    for factor, params in by_factor.items():
        context = _context(draft, params, coef)
        if factor != 1:
            context = replace(context, scalars=replace(draft.scalars, lr=draft.scalars.rates[factor]))
        draft.inputs.optimizer.update(context)


def _context(draft: Draft, params: Sequence[TrainedParam], coef: Value) -> UpdateContext:
    inputs = draft.inputs
    return UpdateContext(
        builder=draft.builder,
        params=params,
        clip_coef=coef,
        scalars=draft.scalars,
        precision=inputs.precision,
        weight_decay=inputs.weight_decay,
        options=inputs.optimizer_options,
    )


def _states_of_wholes(
    draft: Draft, params: Iterable[ParamInfo], coef: Value, factors: Factors
) -> Sequence[Value] | None:
    """Return the states that the optimizer declares for whole params; None if ranks divide none."""
    inputs = draft.inputs
    infos = list(params)
    if all(info.part is None for info in infos):
        return None
    alone, whole = replace(draft, builder=draft.builder.forked()), []
    for info in infos:
        master = info.master
        if info.part is not None and master is not None:
            shared = master is info.part
            master = info.param if shared else replace(master, shape=info.param.shape, shard=None)
        whole.append(_param_grad(alone, replace(info, part=None, grad_part=None, master=master)))
    with alone.builder.record("update"):
        for group in inputs.grouping(whole):
            _emit_update(alone, group, coef, factors)
    return alone.builder.declared[len(draft.builder.declared) :]


def _block(group: Sequence[TrainedParam]) -> int:
    """Return the block of all params of a group; -1 if they are of several."""
    first, *others = {p.param.block for p in group}
    return -1 if others else first


def _param_grad(draft: Draft, info: ParamInfo) -> TrainedParam:
    """Return what the optimizer updates. The amax of a part is a state, because ranks combine it in its place.

    That of a param which one rank owns is not seen: the recipe reads the param.
    """
    assert info.grad is not None and info.master is not None
    b, inputs = draft.builder, draft.inputs
    reads_amax = inputs.lowering is None and inputs.recipe.reads_amax(info, inputs.precision, inputs.recipe_options)
    reads_amax &= info.part is None or info.part.owner is None
    amax = None
    if reads_amax and info.part is None:
        amax = b.activation("amax", (), "fp32")
    elif reads_amax:
        amax = b.state(f"amax.{info.param.name}", (), "fp32", None, collects="max", derived=True)
    return TrainedParam(
        param=info.part or info.param,
        grad=info.grad_part or info.grad,
        master=info.master,
        of_model=info.of_model,
        kind=info.kind,
        matrices=info.matrices,
        amax=amax,
    )


def _check_skipped_steps(inputs: PlanInputs, weights: Collection[Value], program: Program, coef: Value) -> None:
    """Check that ops that write weights know of `coef`, directly or by what is made of it: else none can be skipped."""
    known = {coef}
    for op in program.ops:
        if not known.isdisjoint(op.ins):
            known.update(op.written)
        elif blind := sorted(v.name for v in op.written if v in weights):
            raise ProgramError(
                f"optimizer {inputs.optimizer.name}: {op.kind} ({op.where}) writes {blind[0]} without clip_coef: the "
                "gradient is not clipped, and a step whose gradient is not finite is not skipped"
            )


GradientParts = Sequence[tuple[Value, Value]]
"""Gradients, and what a rank has of each: a part, or all of it."""


def emit_norm(b: Builder, gradients: GradientParts, outs: Sequence[Value], *, ranks: int, max_norm: float) -> None:
    """Emit the norm of gradients and the factor that clips them, `outs`.

    Every rank sums the chunks of its parts and of the gradients that all ranks have, and receives the sums of others.
    """
    if ranks == 1:
        b.emit("global_norm", *(own for _, own in gradients), outs=outs, max_norm=max_norm)
        return
    divided = any(own.shard for _, own in gradients)
    of_rank = [[pair for pair in gradients if pair[1].owner in (None, rank)] for rank in range(ranks if divided else 1)]
    if any(own.owner is not None for _, own in gradients):
        sums = [_square_sums(b, pairs, ranks, rank) for rank, pairs in enumerate(of_rank) if pairs]
        shapes = ((sum(own.size for own in sums),),)
        (every,) = b.emit("broadcast", *sums, lane="comm", world_size=ranks, shapes=shapes)
    else:
        every = _square_sums(b, gradients)
        if divided:
            shapes = ((ranks * every.size,),)
            (every,) = b.emit("all_gather", every, lane="comm", world_size=ranks, shapes=shapes)
    b.emit("norm_of_sums", every, outs=outs, ranges=_ranges(gradients, of_rank), max_norm=max_norm)


def _square_sums(b: Builder, gradients: GradientParts, ranks: int = 1, owner: int | None = None) -> Value:
    """Emit the sums of squares of the chunks of what a rank has; with an `owner`, of what this rank has."""
    chunks = [chunk_size(whole.size) for whole, _ in gradients]
    count = sum(_chunks(own, whole) for whole, own in gradients)
    out = b.activation("square_sums", (count,), "fp64")
    if owner is not None:
        out = part_of(out, ranks, owner)
    b.emit("square_sums", *(own for _, own in gradients), outs=[out], chunks=tuple(chunks))
    return out


def _ranges(gradients: GradientParts, of_rank: Sequence[GradientParts]) -> tuple[tuple[int, int], ...]:
    """Return where the sums of all gradients are, in the order of `gradients`, in the sums of one rank after another.

    Sums of padding are left out, and so are those that an earlier rank has too.
    """
    found: dict[Value, list[tuple[int, int]]] = {whole: [] for whole, _ in gradients}
    at = 0
    for pairs in of_rank:
        for whole, own in pairs:
            missing = _chunks(whole, whole) - sum(count for _, count in found[whole])
            if missing:
                found[whole].append((at, min(_chunks(own, whole), missing)))
            at += _chunks(own, whole)
    return tuple(one for ranges in found.values() for one in ranges)


def _chunks(own: Value, whole: Value) -> int:
    return -(-own.size // chunk_size(whole.size))
