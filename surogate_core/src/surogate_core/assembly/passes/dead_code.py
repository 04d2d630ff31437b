"""Ops that no op reads are dropped."""

from __future__ import annotations

from ...program.passes.dead_code import dead_code
from ..draft import Draft


def drop_dead_code(draft: Draft) -> Draft:
    """Drop what the pass before has left unread, in the programs that it has made."""
    for program in [draft.programs[name] for name in draft.latest]:
        draft = draft.having(draft.verified(program, dead_code(program, draft.inputs.ops)))
    return draft
