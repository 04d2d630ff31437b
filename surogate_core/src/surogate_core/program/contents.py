"""The initial contents of values: which are random, and which a value, or a part of one, can have."""

from __future__ import annotations

from collections.abc import Sequence

from .value import Init


def drawn(init: Init) -> bool:
    """Return whether the contents are random."""
    return init.kind in ("normal", "uniform", "log_uniform")


def alike(init: Init) -> bool:
    """Return whether all elements are the same, so that those of a part are those of the whole."""
    return not drawn(init) and init.kind != "values"


def misfit(init: Init, shape: Sequence[int]) -> str:
    """Return why a value of this shape cannot have the contents; "" if it can."""
    rows = shape[0] if shape else 0
    if init.kind != "values" or len(init.values) == rows:
        return ""
    return f"has {len(init.values)} values, expected one for each of its {rows} rows"
