"""Applies an op's shape rule, and says where when it does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ProgramError
from .value import Value

if TYPE_CHECKING:
    from ..api import OpDef, OutSpec


def infer(definition: OpDef, ins: Sequence[Value], attrs: Mapping[str, Any], place: str) -> Sequence[OutSpec]:
    """What the op's definition says of its outputs. Raises ProgramError beginning with `place` (op, block, line)."""
    try:
        return definition.infer(ins, attrs)
    except (ProgramError, LookupError, TypeError, ValueError) as error:
        told = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
        raise ProgramError(f"{place}: {definition.kind}({', '.join(map(repr, ins))}): {told}") from error
