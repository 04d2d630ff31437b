"""JSON objects with a hash of themselves, so that a file that proves others is proved too.

The hash is of the content and not of its text: spaces and the order of keys do not matter. It detects damage by a disk,
not tampering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .required import required

SEAL = "xxh3_128"


class BrokenSeal(ValueError):
    """An object without its hash, or with the hash of another one."""


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with its hash, as JSON would give it back."""
    plain = json.loads(json.dumps(content))
    return {**plain, SEAL: _hash(plain)}


def unsealed(content: Any) -> dict[str, Any]:
    """Return the object without its hash. Raises BrokenSeal unless it has the right one."""
    if not isinstance(content, dict):
        raise BrokenSeal(f"holds {type(content).__name__}, not an object")
    plain = {key: value for key, value in content.items() if key != SEAL}
    if SEAL not in content:
        raise BrokenSeal("its hash is missing")
    if content[SEAL] != _hash(plain):
        raise BrokenSeal("its content differs from what was written (hash mismatch)")
    return plain


def _hash(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    digest: str = required("xxhash", __name__).xxh3_128(text.encode()).hexdigest()
    return digest
