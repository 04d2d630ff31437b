"""Programs read frozen matrices from the states that hold them in a weight format.

    derive    param -> states of the format, instead of the copies that the recipe makes of the param
    others    states -> the matrix -> the recipe's copies of it, if it makes any, in front of the first op that reads
              one of them; or states -> those copies that this op reads, if the format can

It follows the recipe's lowering, which need not know the format; one that knows its `layout` may read the states
itself. Nothing but `derive` reads the params then, so they are staged. The values that are added have the label
WEIGHT_LABEL, which the recompute pass drops after the forward pass: no matrix is kept from one block to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...api import StorageContext, WeightFormatDef
from ...errors import ProgramError
from ...origin import blaming
from ...program.op import Op, Program
from ...program.value import WEIGHT_LABEL, Value
from ..assembly import ADAPTER_START
from ..draft import Draft

_Copies = Mapping[Value, Op]
"""{state that the recipe makes of stored params: the op of `derive` that wrote it}"""

_Now = dict[Value, Value]
"""{stored param, or copy of one that a recipe makes: the activation that has its contents}"""


def read_stored(draft: Draft) -> Draft:
    """Let micro-steps and evaluations read the states, and `derive` make no copies of the params."""
    derive = draft.programs["derive"]
    copying = {op for op in derive.ops if op not in draft.storing and any(value in draft.stored for value in op.ins)}
    copies = {value: op for op in copying for value in op.outs}
    _check_readers(draft, copies)
    draft.builder.forget(copies)
    by = draft.weight_format, "dequantize"

    def reading(program: Program) -> Program:
        return draft.verified(program, _reading(draft, program, copies), by)

    without = replace(derive, ops=tuple(op for op in derive.ops if op not in copying))
    after = draft.changing_micro_steps(reading).having(reading(draft.programs["evaluate"]))
    return after.having(draft.verified(derive, without))


def read_stored_at_start(draft: Draft) -> Draft:
    """Let the program of adapters' starts read the states."""
    program = draft.programs[ADAPTER_START]
    return draft.having(draft.verified(program, _reading(draft, program, {})))


def storage_context(draft: Draft, param: Value) -> StorageContext[Any]:
    """Return what functions of the weight format get for a param."""
    assert draft.inputs.weight_format is not None
    return StorageContext(builder=draft.builder, param=draft.params[param], options=draft.inputs.weight_format[1])


def _check_readers(draft: Draft, copies: _Copies) -> None:
    """Raise ProgramError if a recipe uses stored params, or its copies of them, otherwise than this pass can serve."""
    format = draft.weight_format
    for op in copies.values():
        other = next((v for v in op.ins if v not in draft.stored), None)
        if other is not None:
            raise ProgramError(
                f"derive: {op.kind} ({op.where}) reads {other!r} besides weights that are stored in "
                f"{format.name}; an op of `derive` that reads frozen weights may read nothing else"
            )
    for program in (draft.programs["start"], draft.programs["update"]):
        value = next((v for v in program.values() if v in draft.stored or v in copies), None)
        if value is not None:
            raise ProgramError(
                f"{program.name}: uses {value!r}, which is stored in {format.name}; only micro-steps and "
                "evaluations can read it"
            )


def _reading(draft: Draft, program: Program, copies: _Copies) -> Program:
    """Return `program` with ops that dequantize in front of the first op that reads what they yield.

    Outside of blocks that is in front of every such op: the ops that read a tied embedding are a whole pass apart, as
    are those of the reference phase from others.
    """
    now: _Now = {}
    ops: list[Op] = []
    phase = None
    for op in program.ops:
        if phase == "reference" != op.phase:
            now = {}
        phase = op.phase
        wanted = [v for v in op.ins if v in draft.stored or v in copies]
        for value in wanted:
            if value not in now:
                with draft.builder.record(op.phase, value.block) as emitted:
                    _materialise(draft, value, wanted, copies, now)
                ops += emitted
        ops.append(op.on(now))
        if wanted:
            now = {value: found for value, found in now.items() if value.block >= 0}
    return replace(program, ops=tuple(ops))


def _materialise(draft: Draft, value: Value, wanted: Sequence[Value], copies: _Copies, now: _Now) -> None:
    """Emit what yields a stored param, or the recipe's copies of stored params. Add the results to `now`.

    `wanted` is what one op reads. The format makes all of these copies, also those that exist. Otherwise a backward op
    that reads a copy of its own would read the scale of the forward pass, and the recompute pass, which can only emit
    whole ops again, would make the copy of the forward pass again for that scale.
    """
    copying, format = copies.get(value), draft.weight_format
    if copying is None:
        with blaming(format.origin, "dequantize"):
            found = format.dequantize(draft.stored[value], storage_context(draft, value))
            _check("dequantize", format, found, value)
        now[value] = found
        return
    outputs = [i for i, out in enumerate(copying.outs) if out in wanted]
    made = _made_by_the_format(draft, copying, outputs)
    if made is not None:
        now |= zip((copying.outs[i] for i in outputs), made, strict=True)
        return
    for param in copying.ins:
        if param not in now:
            _materialise(draft, param, wanted, copies, now)
    labels = [WEIGHT_LABEL] * len(copying.outs)
    outs = draft.builder.emit(copying.kind, *(now[param] for param in copying.ins), label=labels, **copying.attrs)
    now |= zip(copying.outs, outs, strict=True)


def _made_by_the_format(draft: Draft, copying: Op, outputs: Sequence[int]) -> Sequence[Value] | None:
    """Return outputs of an op that copies a stored param, made from its states; None if the format makes none."""
    format = draft.weight_format
    if format.copies is None or len(copying.ins) != 1:
        return None
    (param,) = copying.ins
    with blaming(format.origin, "copies"):
        copies = format.copies(draft.stored[param], copying, outputs, storage_context(draft, param))
        for found, index in zip(copies or (), outputs, strict=copies is not None):
            _check("copies", format, found, copying.outs[index])
    return copies


def _check(function: str, format: WeightFormatDef, found: Value, value: Value) -> None:
    if (found.shape, found.dtype, found.label) != (value.shape, value.dtype, WEIGHT_LABEL):
        raise ProgramError(
            f"{function} of weight format {format.name} returned {found!r} with label {found.label!r}; expected "
            f"{value.dtype}{list(value.shape)} with label {WEIGHT_LABEL!r}"
        )
