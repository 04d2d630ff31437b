"""The folder of this machine for what later runs can use again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Return `$XDG_CACHE_HOME/surogate`, or `~/.cache/surogate` by default. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surogate"
