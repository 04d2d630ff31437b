"""Weights of experts that are stored in a weight format are loaded, and encoded, a few experts at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from ..draft import Draft
from ..staging import in_parts

ENCODED_BYTES = 512 << 20
"""Most bytes of staged experts at a time. Fewer, and plans of large models take longer; more, and a run that stores
all else in few bytes could have its peak here."""


def stages(draft: Draft) -> bool:
    """Return whether params are staged."""
    return bool(draft.staging)


def encode_some_experts(draft: Draft) -> Draft:
    """Divide the programs of `derive` that encode more than `ENCODED_BYTES` of a weight, or than `decoded_experts`."""
    most, b = min(draft.inputs.decoded_experts or ENCODED_BYTES, ENCODED_BYTES), draft.builder
    before = [replace(staged, program=draft.programs[staged.program.name]) for staged in draft.staging]
    staging = [in_parts(staged, most, b) for staged in before]
    after = draft
    for staged, parts in zip(before, staging, strict=True):
        if len(parts) > 1:
            programs = [draft.verified(staged.program, part.program) for part in parts]
            after = after.having_instead(staged.program, programs)
    return replace(after, staging=tuple(chain.from_iterable(staging)))
