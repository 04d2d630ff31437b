"""`surogate quantize`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .. import run


def quantize_command(model: str, output: Path, overrides: Sequence[str], overwrite: bool) -> int:
    """Write the quantized model and print where."""
    model_dir = run.quantize(model, output, overrides, overwrite)
    print(f"quantized {model_dir}: {output}")
    return 0
