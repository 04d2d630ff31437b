"""The folder of this machine for what later runs can use again."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cache_home() -> Path:
    """Return `$XDG_CACHE_HOME/surogate`, or `~/.cache/surogate` by default. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surogate"


def device_file(folder: str, title: str) -> Path:
    """Return the file in a folder of `cache_home` for what holds on one model of device: `<folder>/<title>.json`."""
    return cache_home() / folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.json"
