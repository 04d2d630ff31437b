"""Products add to what was added to their results."""

from __future__ import annotations

from ...program.passes.fuse_adds import fuse_adds
from ..draft import Draft


def fuse_additions(draft: Draft) -> Draft:
    """Fuse additions into products, in the program that `PASSES` names here."""
    assert draft.running is not None
    program = draft.programs[draft.running.of]
    return draft.having(draft.verified(program, fuse_adds(program, draft.inputs.ops)))
