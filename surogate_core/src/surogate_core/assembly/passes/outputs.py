"""Reported values become states, which outlive the program."""

from __future__ import annotations

from dataclasses import replace

from ..draft import Draft


def write_states(draft: Draft) -> Draft:
    """Let the micro-step and the evaluation write what is reported to its states. They have no other outputs."""
    for name, states in (("micro", draft.totals), ("evaluate", draft.evaluated)):
        program = draft.programs[name]
        after = replace(program, outputs=tuple(states)).on(states)
        draft = draft.having(draft.verified(program, after))
    return draft
