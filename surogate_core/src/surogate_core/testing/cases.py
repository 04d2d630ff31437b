"""Parameters of a kernel's tests: a few that meet every path of it, and more.

@pytest.mark.parametrize("columns", cases([5, 264, 8200], more=[1, 8, 64, 16392]))

All of them run, unless `-m "gpu and not exhaustive"` asks for the few alone: what a tool can bear that slows kernels
down a hundredfold, such as compute-sanitizer. A few is at least one case of several thread blocks and odd sizes for
every kernel that the test launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

Cases = Iterable[Any] | Mapping[str, Any]


def cases(few: Cases, more: Cases = ()) -> list[Any]:
    """What `parametrize` takes: `few` as they are, `more` marked `exhaustive`; of a mapping the keys are the ids."""
    return [*_params(few), *_params(more, pytest.mark.exhaustive)]


def _params(values: Cases, *marks: pytest.MarkDecorator) -> list[Any]:
    if isinstance(values, Mapping):
        return [pytest.param(value, id=name, marks=marks) for name, value in values.items()]
    return [pytest.param(value, marks=marks) for value in values]
