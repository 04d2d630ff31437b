"""Reverse mode: appends the backward ops to a forward program, by each op's own rule.

Nothing here knows an op. A rule (`OpDef.vjp`) emits ops for every input's gradient; what nobody reads, `dead_code`
removes, so frozen params cost nothing. An op without a rule is differentiated through its torch reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import ProgramError
from .builder import Builder
from .op import Op, Program
from .value import FLOAT_DTYPES, Value


def differentiate(
    program: Program, loss: Value, builder: Builder, trainable: Callable[[Value], bool], grad_dtype: str
) -> tuple[Program, dict[Value, Value]]:
    """Append the gradients of `loss` with respect to every trainable param.

    Returns the program and {param: gradient value}, in the order in which the params were declared. A gradient with
    several contributions (tied embeddings) is written by several ops; `accumulate` turns all but the first into
    additions. Raises ProgramError when the loss does not depend on a trainable param, naming it.
    """
    params = [v for v in program.values() if v.role == "param" and trainable(v)]
    order = {value: i for i, value in enumerate(builder.declared)}
    params.sort(key=lambda v: order[v])
    wanted = _depends_on(program, params)
    if loss not in wanted:
        raise ProgramError(f"{program.name}: the loss {loss!r} depends on no trainable param")

    forward, grads = _seed(program, loss, builder)
    contributions: dict[Value, list[Value]] = {}

    def add(value: Value, gradient: Value) -> None:
        if value.role == "param":
            contributions.setdefault(value, []).append(gradient)
        elif value in grads:
            grads[value] = builder.apply("add", grads[value], gradient, label=f"d_{value.label}")
        else:
            grads[value] = gradient

    backward: list[Op] = []
    for op in reversed(forward):
        rule_outs = tuple(grads.get(out) for out in op.outs)
        seeds = [(op.ins[i], g) for i, g in _loss_grads(op, loss, builder)]
        if not seeds and (all(g is None for g in rule_outs) or not any(i in wanted for i in op.ins)):
            continue
        with builder.record("backward", op.block) as emitted:
            results: list[tuple[Value, Value | None]] = [*seeds]
            if not seeds:
                results += zip(op.ins, _vjp(builder, op, rule_outs), strict=True)
            for value, gradient in results:
                if gradient is not None and value in wanted:
                    add(value, gradient)
        backward += emitted

    missing = [p.name for p in params if p not in contributions]
    if missing:
        raise ProgramError(f"{program.name}: trainable but not used by the loss: {', '.join(missing)}")
    gradients = {p: builder.grad(p, "fp64" if p.dtype == "fp64" else grad_dtype) for p in params}
    ops = _write_gradients([*forward, *backward], contributions, gradients, builder)
    return Program(program.name, tuple(ops), program.outputs), gradients


def _depends_on(program: Program, params: list[Value]) -> set[Value]:
    """Floating-point values that a change of `params` changes: only these need gradients."""
    reached = set(params)
    for op in program.ops:
        if any(v in reached for v in op.ins):
            reached.update(v for v in op.outs if v.dtype in FLOAT_DTYPES)
    return reached


def _seed(program: Program, loss: Value, builder: Builder) -> tuple[list[Op], dict[Value, Value]]:
    """The forward ops, with the loss op replaced by the kind that also yields gradients, or d(loss) = 1."""
    forward = list(program.ops)
    index = next((i for i, op in enumerate(forward) if loss in op.outs), None)
    if index is None:
        raise ProgramError(f"{program.name}: no op writes the loss {loss!r}")
    op = forward[index]
    fused = builder.ops[op.kind].loss_with_grads
    if fused is None:
        with builder.record("forward") as ops:
            one = builder.apply("fill", label="d_loss", shape=loss.shape, dtype=loss.dtype, value=1.0)
        return [*forward, *ops], {loss: one}
    with builder.record("forward", op.block):
        outs = builder.emit(fused, *op.ins, **op.attrs)
    forward[index] = replace(op, kind=fused, outs=(loss, *outs[1:]))
    return forward, {}


def _loss_grads(op: Op, loss: Value, builder: Builder) -> list[tuple[int, Value]]:
    """(input index, gradient) pairs that a fused loss op has written; empty for every other op."""
    if loss not in op.outs:
        return []
    for definition in builder.ops.values():
        if definition.loss_with_grads == op.kind:
            return list(zip(definition.loss_grad_ins, op.outs[1:], strict=True))
    return []


def _vjp(builder: Builder, op: Op, grads: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
    rule = builder.ops[op.kind].vjp
    if rule is not None:
        results = rule(builder, op, grads)
        if len(results) != len(op.ins):
            raise ProgramError(
                f"{op.where}: vjp of {op.kind} returned {len(results)} gradients for {len(op.ins)} inputs"
            )
        return results
    given = [i for i, g in enumerate(grads) if g is not None]
    floats = [i for i, v in enumerate(op.ins) if v.dtype in FLOAT_DTYPES]
    outs = builder.emit(
        "reference_vjp",
        *op.ins,
        *(g for g in grads if g is not None),
        reference=builder.ops[op.kind].reference,
        of=op.kind,
        of_attrs=dict(op.attrs),
        n_ins=len(op.ins),
        given=tuple(given),
        wrt=tuple(floats),
    )
    by_input = dict(zip(floats, outs, strict=True))
    return tuple(by_input.get(i) for i in range(len(op.ins)))


def _write_gradients(
    ops: list[Op], contributions: dict[Value, list[Value]], gradients: dict[Value, Value], builder: Builder
) -> list[Op]:
    """Let the ops that compute a contribution write the gradient itself; copy where another op reads it too."""
    readers = {v for op in ops for v in op.ins}
    target: dict[Value, Value] = {}
    copies: dict[Value, list[Value]] = {}
    for param, values in contributions.items():
        for value in values:
            if value in readers or value in target or value.role != "act":
                copies.setdefault(value, []).append(gradients[param])
            else:
                target[value] = gradients[param]
    written = [replace(op, outs=tuple(target.get(v, v) for v in op.outs)) for op in ops]
    result: list[Op] = []
    for op in written:
        result.append(op)
        for value in op.outs:
            for gradient in copies.get(value, ()):
                with builder.record("backward", op.block) as emitted:
                    builder.emit("cast", value, outs=[gradient], dtype=gradient.dtype)
                result += emitted
    return result
