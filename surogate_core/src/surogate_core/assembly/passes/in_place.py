"""Outputs take the place of inputs that no later op reads."""

from __future__ import annotations

from ...program.passes.in_place import in_place
from ..draft import Draft


def overwrite_inputs(draft: Draft) -> Draft:
    """Mark the ops of all programs that may write to the place of an input."""
    ops = draft.inputs.ops
    return draft.having(*[draft.verified(program, in_place(program, ops)) for program in draft.programs.values()])
