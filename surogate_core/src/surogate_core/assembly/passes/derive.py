"""The program `derive` makes what needs params at every start, such as quantized weights."""

from __future__ import annotations

from ..draft import Draft


def begin_derive(draft: Draft) -> Draft:
    """Begin the program `derive`, without ops yet."""
    b = draft.builder
    with b.record("derive"):
        return draft.having(draft.verified(None, b.program("derive", stage="derive")))
