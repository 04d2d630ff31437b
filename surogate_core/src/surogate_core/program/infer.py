"""Checks of an op's attributes and shape inference, with the location in their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ProgramError
from .opdef import OpDef, OutSpec
from .value import Value


def infer(definition: OpDef, ins: Sequence[Value], attrs: Mapping[str, Any], place: str) -> Sequence[OutSpec]:
    """Return the output specs given by the op's shape rule.

    Raises ProgramError if the op does not have these attributes or the rule fails. The message begins with `place` (op,
    block, line).
    """
    try:
        definition.check_attrs(attrs)
        return definition.infer(ins, attrs)
    except (ProgramError, LookupError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
        raise ProgramError(f"{place}: {definition.kind}({', '.join(map(repr, ins))}): {reason}") from error
