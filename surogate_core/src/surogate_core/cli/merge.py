"""`surogate merge`."""

from __future__ import annotations

from pathlib import Path

from .. import run


def merge_command(adapter: Path, output: Path, base: str | None, overwrite: bool, kind: str | None) -> int:
    """Write base and adapter as one model and print where."""
    base_dir = run.merge(adapter, output, base, overwrite, kind)
    print(f"merged {adapter} into {base_dir}: {output}")
    return 0
