"""Frozen matrices of a model are stored in a weight format. `read_stored` dequantizes them where programs read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...api import ParamInfo, ParamKind
from ...errors import ConfigError, ProgramError
from ...front_end import called
from ...origin import blaming
from ...program.op import Op, Program
from ...program.value import Value
from ...program.verify import Checked, verify
from ..draft import Draft
from .read_stored import storage_context

STORABLE: tuple[ParamKind, ...] = ("head", "embedding")
"""Kinds of params that can be stored besides the matrices of blocks, each if a run asks for it."""


def store_weights(draft: Draft) -> Draft:
    """Declare the states that hold frozen params, and let `derive` write them. Raises ConfigError if there are none."""
    inputs, b, format = draft.inputs, draft.builder, draft.weight_format
    _check_kinds(draft.params.values(), inputs.stored_kinds)
    params = _stored(draft)
    if not params:
        raise ConfigError(f"{format.key}: this run trains every matrix of the model's blocks. Leave it out.")
    states: dict[Value, Sequence[Value]] = {}
    writing: list[Op] = []
    checked = Checked()
    for param in params:
        with blaming(format.origin, "quantize"), b.record("derive", param.block) as emitted:
            states[param] = tuple(format.quantize(storage_context(draft, param)))
            verify(Program("derive", tuple(emitted), stage="derive"), b.ops, "quantize", checked)
            written = {value for op in emitted for value in op.outs}
            if forgotten := [value for value in states[param] if value not in written]:
                raise ProgramError(f"returned {forgotten[0]!r}, which it does not write")
        writing += emitted
    derive = draft.programs["derive"]
    after = draft.verified(derive, replace(derive, ops=tuple(writing)), (format, "quantize"))
    return replace(draft.having(after), stored=states, storing=frozenset(writing))


def _stored(draft: Draft) -> list[Value]:
    """Return the params that are stored: of the matrices of blocks, those that the format stores."""
    format, kinds = draft.weight_format, draft.inputs.stored_kinds
    every = [info for info in draft.params.values() if _is_stored(info, kinds)]
    matrices = [info for info in every if info.kind == "matrix"]
    with blaming(format.origin, "stores"):
        chosen = {info.param for info in format.stores(matrices)} if matrices else set()
        if strange := chosen - {info.param for info in matrices}:
            raise ProgramError(f"returned {next(iter(strange))!r}, which is none of the matrices that it was given")
    return [info.param for info in every if info.kind != "matrix" or info.param in chosen]


def _is_stored(info: ParamInfo, kinds: Collection[ParamKind]) -> bool:
    """Return whether a param is stored in the run's weight format: a frozen matrix of a block, or of another kind."""
    inside = info.param.block >= 0 or info.kind != "matrix"
    frozen = info.of_model and info.grad is None and not info.precise
    return frozen and info.kind in kinds and inside and len(info.param.shape) == 2


def _check_kinds(params: Collection[ParamInfo], kinds: Collection[ParamKind]) -> None:
    """Raise ConfigError if a run asks for a kind of which it stores no param."""
    by_kind = {kind: [info for info in params if info.kind == kind and info.of_model] for kind in STORABLE}
    for kind in STORABLE:
        asked = _asked(kind)
        tied = kind == "head" and not by_kind["head"]  # a head without a param of its own is the embedding
        found = by_kind["embedding"] if tied else by_kind[kind]
        if kind not in kinds or any(_is_stored(info, kinds) for info in found):
            continue
        if not found:
            raise ConfigError(f"{asked}, but this model has no {kind}. Leave it out.")
        if any(info.grad is not None for info in found):
            raise ConfigError(f"{asked}, but this run trains {found[0].param.name} in full. Leave it out.")
        raise ConfigError(
            f"{asked}, but the LM head of this model is its embedding. {_asked('embedding')} stores both."
        )


def _asked(kind: ParamKind) -> str:
    """Return how a run asks that params of a kind are stored."""
    return called(f"stored_kinds: {kind}")
