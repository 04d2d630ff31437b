"""The bytes of each tensor of a model's files, from their headers alone. No torch."""

from __future__ import annotations

from math import prod
from pathlib import Path

from surogate_core.api.regular_file import is_regular

_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}


def stored_bytes(model_dir: Path) -> dict[str, int] | None:
    """Return {tensor: bytes}; None if there are no weights, or if a file cannot be read, which training names."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, int] = {}
    for path in sorted(model_dir.glob("model*.safetensors")):
        if not is_regular(path):
            return None
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118, no mapping
                    held = file.get_slice(name)
                    found[name] = prod(held.get_shape()) * _BITS.get(held.get_dtype(), 8) // 8
        except (SafetensorError, OSError):
            return None
    return found or None
