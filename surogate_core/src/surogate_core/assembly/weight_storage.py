"""Stores the frozen matrices of a model in a weight format, and dequantizes them where programs read them.

    derive    param -> states of the format, instead of the copies that the recipe makes of the param
    others    states -> the matrix -> the recipe's copies of it, if it makes any, in front of the first op that reads
              one of them; or states -> those copies that this op reads, if the format can

The pass runs after the recipe's lowering, which need not know the format; one that knows its `layout` may read the
states itself. Nothing but `derive` reads the params then, so they are staged. The values that it adds have the label
WEIGHT_LABEL, which the recompute pass drops after the forward pass: no matrix is kept from one block to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..api import ParamInfo, ParamKind, Programs, StorageContext, WeightFormatDef
from ..errors import ConfigError, ProgramError
from ..origin import blaming
from ..program.builder import Builder
from ..program.op import Op, Program
from ..program.value import WEIGHT_LABEL, Value
from ..program.verify import Checked, verify

STORED_BY: Mapping[ParamKind, str] = {"head": "quantize_lm_head", "embedding": "quantize_embedding"}
"""Keys that store a kind of param besides the matrices of blocks."""


Stored = Mapping[Value, Sequence[Value]]
"""{frozen param: the states that hold it}"""


@dataclass(frozen=True)
class WeightStorage:
    """The matrices that are stored in a weight format.

    contexts  {param: what functions of the format get for it}
    states    {param: the states that hold it}
    writing   the ops of `derive` that write these
    copies    {state that the recipe makes of such params: the op of `derive` that wrote it}
    """

    format: WeightFormatDef
    contexts: Mapping[Value, StorageContext[Any]]
    states: Stored
    writing: Sequence[Op]
    copies: Mapping[Value, Op] = field(default_factory=dict)


_Now = dict[Value, Value]
"""{stored param, or copy of one that a recipe makes: the activation that has its contents}"""


def store_weights(
    every: Mapping[Value, ParamInfo], kinds: Collection[ParamKind], format: WeightFormatDef, options: Any, b: Builder
) -> WeightStorage:
    """Declare the states that hold the frozen params of `kinds` in `format`. Raises ConfigError if there are none."""
    _check_kinds(every.values(), kinds)
    contexts = {
        param: StorageContext(builder=b, param=info, options=options)
        for param, info in every.items()
        if _is_stored(info, kinds)
    }
    if not contexts:
        raise ConfigError(f"{format.key}: this run trains every matrix of the model's blocks. Remove the key.")
    states: dict[Value, Sequence[Value]] = {}
    writing: list[Op] = []
    checked = Checked()
    for param, context in contexts.items():
        with blaming(format.origin, "quantize"), b.record("derive", param.block) as emitted:
            states[param] = tuple(format.quantize(context))
            verify(Program("derive", tuple(emitted), stage="derive"), b.ops, "quantize", checked)
            written = {value for op in emitted for value in op.outs}
            if forgotten := [value for value in states[param] if value not in written]:
                raise ProgramError(f"returned {forgotten[0]!r}, which it does not write")
        writing += emitted
    return WeightStorage(format, contexts, states, writing)


def read_stored(programs: Programs, storage: WeightStorage, b: Builder) -> Programs:
    """Return lowered programs, whose `derive` writes the states, that reads the params from them."""
    states = storage.states
    writing = set(storage.writing)
    copying = {op for op in programs.derive.ops if op not in writing and any(value in states for value in op.ins)}
    storage = replace(storage, copies={value: op for op in copying for value in op.outs})
    _check_readers(programs, storage)
    b.forget(storage.copies)
    return replace(
        programs.with_micro_steps(lambda program: reading_stored(program, storage, b)),
        evaluate=reading_stored(programs.evaluate, storage, b),
        derive=replace(programs.derive, ops=tuple(op for op in programs.derive.ops if op not in copying)),
    )


def _is_stored(info: ParamInfo, kinds: Collection[ParamKind]) -> bool:
    """Return whether a param is stored in the run's weight format: a frozen matrix of a block, or of another kind."""
    inside = info.param.block >= 0 or info.kind != "matrix"
    return info.of_model and info.grad is None and info.kind in kinds and inside and len(info.param.shape) == 2


def _check_kinds(params: Collection[ParamInfo], kinds: Collection[ParamKind]) -> None:
    """Raise ConfigError if a key asks for a kind of which the run stores no param."""
    by_kind = {kind: [info for info in params if info.kind == kind and info.of_model] for kind in STORED_BY}
    for kind, key in STORED_BY.items():
        tied = kind == "head" and not by_kind["head"]  # a head without a param of its own is the embedding
        found = by_kind["embedding"] if tied else by_kind[kind]
        if kind not in kinds or any(_is_stored(info, kinds) for info in found):
            continue
        if not found:
            raise ConfigError(f"{key}: true, but this model has no {kind}. Remove the key.")
        if any(info.grad is not None for info in found):
            raise ConfigError(f"{key}: true, but this run trains {found[0].param.name} in full. Remove the key.")
        raise ConfigError(
            f"{key}: true, but the LM head of this model is its embedding. {STORED_BY['embedding']}: true stores both."
        )


def _check_readers(programs: Programs, storage: WeightStorage) -> None:
    """Raise ProgramError if a recipe uses stored params, or its copies of them, otherwise than this pass can serve."""
    for op in storage.copies.values():
        other = next((v for v in op.ins if v not in storage.states), None)
        if other is not None:
            raise ProgramError(
                f"derive: {op.kind} ({op.where}) reads {other!r} besides weights that are stored in "
                f"{storage.format.name}; an op of `derive` that reads frozen weights may read nothing else"
            )
    for program in (programs.start, programs.update):
        value = next((v for v in program.values() if v in storage.states or v in storage.copies), None)
        if value is not None:
            raise ProgramError(
                f"{program.name}: uses {value!r}, which is stored in {storage.format.name}; only micro-steps and "
                "evaluations can read it"
            )


def reading_stored(program: Program, storage: WeightStorage, b: Builder) -> Program:
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
        wanted = [v for v in op.ins if v in storage.states or v in storage.copies]
        for value in wanted:
            if value not in now:
                with b.record(op.phase, value.block) as emitted:
                    _materialise(value, wanted, storage, b, now)
                ops += emitted
        ops.append(op.on(now))
        if wanted:
            now = {value: found for value, found in now.items() if value.block >= 0}
    return replace(program, ops=tuple(ops))


def _materialise(value: Value, wanted: Sequence[Value], storage: WeightStorage, b: Builder, now: _Now) -> None:
    """Emit what yields a stored param, or the recipe's copies of stored params. Add the results to `now`.

    `wanted` is what one op reads. The format makes all of these copies, also those that exist. Otherwise a backward op
    that reads a copy of its own would read the scale of the forward pass, and the recompute pass, which can only emit
    whole ops again, would make the copy of the forward pass again for that scale.
    """
    copying, format = storage.copies.get(value), storage.format
    if copying is None:
        with blaming(format.origin, "dequantize"):
            found = format.dequantize(storage.states[value], storage.contexts[value])
            _check("dequantize", format, found, value)
        now[value] = found
        return
    outputs = [i for i, out in enumerate(copying.outs) if out in wanted]
    copies = _copies(copying, outputs, storage)
    if copies is not None:
        now |= zip((copying.outs[i] for i in outputs), copies, strict=True)
        return
    for param in copying.ins:
        if param not in now:
            _materialise(param, wanted, storage, b, now)
    labels = [WEIGHT_LABEL] * len(copying.outs)
    outs = b.emit(copying.kind, *(now[param] for param in copying.ins), label=labels, **copying.attrs)
    now |= zip(copying.outs, outs, strict=True)


def _copies(copying: Op, outputs: Sequence[int], storage: WeightStorage) -> Sequence[Value] | None:
    """Return outputs of an op that copies a stored param, made from its states; None if the format makes none."""
    format = storage.format
    if format.copies is None or len(copying.ins) != 1:
        return None
    (param,) = copying.ins
    with blaming(format.origin, "copies"):
        copies = format.copies(storage.states[param], copying, outputs, storage.contexts[param])
        for found, index in zip(copies or (), outputs, strict=copies is not None):
            _check("copies", format, found, copying.outs[index])
    return copies


def _check(function: str, format: WeightFormatDef, found: Value, value: Value) -> None:
    if (found.shape, found.dtype, found.label) != (value.shape, value.dtype, WEIGHT_LABEL):
        raise ProgramError(
            f"{function} of weight format {format.name} returned {found!r} with label {found.label!r}; expected "
            f"{value.dtype}{list(value.shape)} with label {WEIGHT_LABEL!r}"
        )
