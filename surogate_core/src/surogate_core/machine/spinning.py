"""The time for which threads of torch spin on a CPU before they sleep."""

from __future__ import annotations

import os

_SPINS = "1000"


def spin_shortly() -> None:
    """Let a CPU thread of torch spin 1,000 times at a barrier before it sleeps. Call it before torch is imported.

    By default it spins without end, which makes a step 10 to 70 times slower as soon as another process computes on the
    same cores (dev/LOG.md). A value in the environment stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
