"""Params of a block that only `derive` reads have a program that reads them."""

from __future__ import annotations

from dataclasses import replace

from ..draft import Draft
from ..staging import split_staged, staged_params


def stage_params(draft: Draft) -> Draft:
    """Split `derive`: what depends on staged params becomes a program for each block (`staging`)."""
    derive = draft.programs["derive"]
    others = [program for program in draft.programs.values() if program is not derive]
    staged = staged_params(derive, others, draft.builder.declared, draft.gradients)
    rest, staging = split_staged(derive, staged)
    if not staging:
        return draft
    programs = [draft.verified(derive, program) for program in (rest, *(one.program for one in staging))]
    return replace(draft.having_instead(derive, programs), staging=staging)
