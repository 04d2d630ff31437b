"""Reads the tables of this folder: data files in TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
