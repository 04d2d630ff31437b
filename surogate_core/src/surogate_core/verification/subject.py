"""The run that is verified, and its plan."""

from __future__ import annotations

from typing import NamedTuple

from ..planning.plan import Plan
from ..planning.run import Run


class Subject(NamedTuple):
    """A run and the plan of the micro-step that is compared."""

    run: Run
    plan: Plan
