"""The evaluation is the forward program without ops for training alone."""

from __future__ import annotations

from ...program.passes.evaluation import for_evaluation
from ..draft import Draft


def make_evaluation(draft: Draft) -> Draft:
    """Make the program `evaluate` of the forward program."""
    forward = draft.programs["forward"]
    return draft.having(draft.verified(forward, for_evaluation(forward, draft.inputs.ops)))
