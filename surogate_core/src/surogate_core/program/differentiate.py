"""Reverse-mode differentiation: appends the backward ops to a forward program.

Each op is differentiated by its own rule (`OpDef.vjp`); this module names no op. A rule emits ops for the gradient of
every input. `dead_code` later removes those that are never read, so frozen params cost nothing. An op without a rule is
differentiated by autograd through its torch reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..dtypes import DTYPES, wider
from ..errors import DisconnectedError, ProgramError
from .builder import Builder
from .op import Op, Program
from .value import Value


def differentiate(
    program: Program,
    losses: Value | Sequence[Value],
    builder: Builder,
    trainable: Callable[[Value], bool],
    grad_dtype: str,
) -> tuple[Program, dict[Value, Value]]:
    """Append ops that compute the gradient of the sum of `losses` with respect to every trainable param.

    Returns the program and a mapping {param: gradient} in declaration order of the params. A gradient with several
    contributions (tied embeddings) is written by several ops; the pass `accumulate` turns all writes but the first into
    additions. Raises DisconnectedError if some trainable param gets no gradient; the message names it.
    """
    params = [v for v in builder.declared if v.role == "param" and trainable(v)]
    wanted = _depends_on(program, params)
    losses = (losses,) if isinstance(losses, Value) else losses
    reached = [loss for loss in losses if loss in wanted]
    if not reached:
        raise DisconnectedError(f"{program.name}: the loss {losses[0]!r} depends on no trainable param")

    forward, grads = list(program.ops), dict[Value, Value]()
    for loss in reached:
        forward = _seed(program.name, forward, grads, loss, wanted, builder)
    contributions: dict[Value, list[Value]] = {}
    ended: dict[Value, Op] = {}

    def add(value: Value, gradient: Value) -> None:
        if value.role == "param":
            contributions.setdefault(value, []).append(gradient)
        elif value in grads:
            grads[value] = _sum(builder, grads[value], gradient, f"d_{value.label}")
        else:
            grads[value] = gradient

    backward: list[Op] = []
    for op in reversed(forward):
        rule_outs = tuple(grads.get(out) for out in op.outs)
        seeds = [(op.ins[i], g) for i, g in _loss_grads(op, reached, builder)]
        if seeds and any(rule_outs):
            raise ProgramError(
                f"{program.name}: the loss of {op.kind} (block {op.block}, {op.where}) is read on the way to another "
                "loss. Return both from build instead of their sum."
            )
        if not seeds and (all(g is None for g in rule_outs) or not any(i in wanted for i in op.ins)):
            continue
        with builder.record("backward", op.block) as emitted:
            results: list[tuple[Value, Value | None]] = [*seeds]
            if not seeds:
                results += zip(op.ins, _vjp(builder, op, rule_outs, wanted), strict=True)
            for value, gradient in results:
                if gradient is not None and value in wanted:
                    add(value, gradient)
                elif value in wanted:
                    ended[value] = op
        backward += emitted

    if missing := [p for p in params if p not in contributions]:
        on_way = _depends_on(program, missing)
        cut = next((op for value, op in ended.items() if value in on_way), None)
        at = cut and f"cut off by vjp of {cut.kind} (block {cut.block}, {cut.where}), which gives None"
        names = f"{at or 'not used by the loss'}: {', '.join(p.name for p in missing)}"
        raise DisconnectedError(f"{program.name}: trainable but {names}", cut.kind if cut else "")
    gradients = {p: builder.grad(p, "fp64" if p.dtype == "fp64" else grad_dtype) for p in params}
    ops = _write_gradients([*forward, *backward], contributions, gradients, builder)
    return replace(program, ops=tuple(ops)), gradients


def _depends_on(program: Program, params: list[Value]) -> set[Value]:
    """Return the floating-point values that depend on `params`. Only these need gradients.

    Values that outlive the program (a state that an op updates, for example) are treated as constants.
    """
    reached = set(params)
    for op in program.ops:
        if any(v in reached for v in op.ins):
            reached.update(v for v in op.outs if DTYPES[v.dtype].has_grad and v.role == "act")
    return reached


def _seed(
    name: str, forward: list[Op], grads: dict[Value, Value], loss: Value, wanted: set[Value], builder: Builder
) -> list[Op]:
    """Return the forward ops with what begins the backward pass of a loss.

    If the loss op has a kind that also computes gradients (`OpDef.loss_with_grads`), it is replaced by that kind.
    Otherwise an op that sets d(loss) = 1, which is added to `grads`, is appended.
    """
    index = next((i for i, op in enumerate(forward) if loss in op.outs), None)
    if index is None:
        raise ProgramError(f"{name}: no op writes the loss {loss!r}")
    op = forward[index]
    definition = builder.ops[op.kind]
    if definition.loss_with_grads is None:
        with builder.record("forward") as ops:
            one = builder.apply("fill", label="d_loss", shape=loss.shape, dtype=loss.dtype, value=1.0)
        grads[loss] = one
        return [*forward, *ops]
    attrs = {**op.attrs, "wrt": tuple(i for i in definition.loss_grad_ins if op.ins[i] in wanted)}
    with builder.record("forward", op.block):
        outs = builder.emit(definition.loss_with_grads, *op.ins, **attrs)
    fused = op.changed(kind=definition.loss_with_grads, outs=(*op.outs, *outs[len(op.outs) :]), attrs=attrs)
    return [*forward[:index], fused, *forward[index + 1 :]]


def _loss_grads(op: Op, losses: Sequence[Value], builder: Builder) -> list[tuple[int, Value]]:
    """Return the (input index, gradient) pairs that a fused loss op writes; an empty list for every other op."""
    if not any(loss in op.outs for loss in losses) or op.kind not in {
        definition.loss_with_grads for definition in builder.ops.values()
    }:
        return []
    return list(zip(op.attrs["wrt"], op.outs[-len(op.attrs["wrt"]) :], strict=True))


def _vjp(builder: Builder, op: Op, grads: tuple[Value | None, ...], wanted: set[Value]) -> tuple[Value | None, ...]:
    """Return the gradients of the op's inputs.

    Emits the op's rule if it has one. Otherwise emits an op that differentiates the reference by autograd, for the
    inputs in `wanted` only.
    """
    rule = builder.ops[op.kind].vjp
    if rule is not None:
        try:
            return rule(builder, op, grads)
        except ProgramError as error:
            raise ProgramError(f"backward of {op.kind} (block {op.block}, {op.where}): {error}") from error
    given = [i for i, g in enumerate(grads) if g is not None]
    wrt = tuple(i for i, v in enumerate(op.ins) if v in wanted and DTYPES[v.dtype].has_grad)
    outs = builder.emit(
        "reference_vjp",
        *op.ins,
        *(g for g in grads if g is not None),
        reference=builder.ops[op.kind].reference,
        of=op.kind,
        of_attrs=dict(op.attrs),
        n_ins=len(op.ins),
        given=tuple(given),
        wrt=wrt,
    )
    by_input = dict(zip(wrt, outs, strict=True))
    return tuple(by_input.get(i) for i in range(len(op.ins)))


def _sum(builder: Builder, a: Value, b: Value, label: str) -> Value:
    """Emit a + b in the wider of the two dtypes, so that an fp32 sum is not narrowed to match a bf16 addend."""
    dtype = wider(a.dtype, b.dtype)
    a, b = (v if v.dtype == dtype else builder.apply("cast", v, dtype=dtype) for v in (a, b))
    return builder.apply("add", a, b, label=label)


def _write_gradients(
    ops: list[Op], contributions: dict[Value, list[Value]], gradients: dict[Value, Value], builder: Builder
) -> list[Op]:
    """Make the op that computes a contribution write it directly to the gradient.

    A contribution is copied instead if another op reads it, if it contributes to another gradient too, if its op
    already writes the same gradient, or if no op computes it.
    """
    readers = {v for op in ops for v in op.ins}
    copies: dict[Value, list[Value]] = {}
    for param, values in contributions.items():
        for contribution in values:
            copies.setdefault(contribution, []).append(gradients[param])
    claimed_by = {v: claims[-1] for v, claims in copies.items() if len(claims) == 1}
    result: list[Op] = []

    def copy(value: Value, block: int) -> None:
        for gradient in copies.pop(value, ()):
            with builder.record("backward", block) as emitted:
                builder.emit("cast", value, outs=[gradient], dtype=gradient.dtype)
            result.extend(emitted)

    for op in ops:
        outs: list[Value] = []
        for value in op.outs:
            gradient = claimed_by.get(value)
            if gradient is None or value in readers or gradient in outs:
                outs.append(value)
            else:
                outs.append(gradient)
                del copies[value]
        result.append(op if tuple(outs) == op.outs else op.changed(outs=tuple(outs)))
        for value in op.outs:
            copy(value, op.block)
    for value in list(copies):
        copy(value, value.block)
    return result
