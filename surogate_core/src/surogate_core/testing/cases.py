"""Parameters of a kernel's tests: a few that cover every code path, and more.

@pytest.mark.parametrize("columns", cases([5, 264, 8200], more=[1, 8, 64, 16392]))

All of them run by default. `-m "gpu and not exhaustive"` selects the few, for tools that slow kernels down a
hundredfold, such as compute-sanitizer. The few must include, for each kernel that the test launches, at least one case
with several thread blocks and odd sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def cases(few: Iterable[Any], more: Iterable[Any] = ()) -> list[Any]:
    """Return parameters for `parametrize`; `more` are marked `exhaustive`. The keys of a mapping are test ids."""
    import pytest

    return [*_params(few), *_params(more, pytest.mark.exhaustive)]


def _params(values: Iterable[Any], *marks: pytest.MarkDecorator) -> list[Any]:
    import pytest

    if isinstance(values, Mapping):
        return [pytest.param(value, id=name, marks=marks) for name, value in values.items()]
    return [pytest.param(value, marks=marks) for value in values]
