"""Seeded damage: to bytes, as by disks and editors, and to parsed JSON, as by people and scripts."""

from __future__ import annotations

import copy
import json
import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.errors import SurogateError

LONGEST_MESSAGE = 20_000
PIECES = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\r",
    b"\n\n",
    b'"',
    b"{",
    b"[[",
    b"}",
    b",",
    b"\\u",
    b"NaN",
    b"1e999",
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**64), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "null", "é漢🦊", "\ud800", "\0", "x" * 5000, "../..", "{", '{"a": 1}', "[1]"),
    *([], {}, [[]], [{}], [None], {"a": {"b": [1]}}, [1, "a", None], ["a", "b"], {"": ""}),
)


def seeds(default: int) -> range:
    """Return SUROGATE_FUZZ_CASES (`default`) seeds from SUROGATE_FUZZ_SEED (1). A failure prints its seed."""
    first = int(os.environ.get("SUROGATE_FUZZ_SEED", 1))
    return range(first, first + int(os.environ.get("SUROGATE_FUZZ_CASES", default)))


def of_bytes(data: bytes, choice: random.Random) -> bytes:
    """Flip bits, cut off the end, insert, remove or repeat pieces, change the encoding, or replace everything."""
    changed = bytearray(data)
    for _ in range(choice.choice((1, 1, 2, 10))):
        at = choice.randrange(len(changed) + 1)
        kind = choice.randrange(8)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << choice.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at : at + choice.choice((0, 1, 4))] = choice.choice(PIECES)
        elif kind == 3:
            del changed[at : at + choice.choice((1, 8, 100))]
        elif kind == 4:
            changed[at:at] = changed[: choice.choice((1, 20, 1000))]
        elif kind == 5 and choice.random() < 0.3:
            changed = bytearray(
                bytes(changed).decode("latin-1").encode(choice.choice(("utf-16", "utf-8-sig", "utf-32")))
            )
        elif kind == 6 and choice.random() < 0.2:
            changed = bytearray(
                choice.choice((b"", b" ", b"\n", b"null", b"[]", b"{}", b"[null]", b"0", b'""', b"\0" * 99))
            )
        elif kind == 7:
            changed[at : at + 8] = bytes(choice.randrange(256) for _ in range(8))
    return bytes(changed)


def of_json(value: Any, choice: random.Random) -> Any:
    """Remove, rename, repeat or retype entries anywhere in a copy of `value`."""
    changed = [copy.deepcopy(value)]
    for _ in range(choice.choice((1, 1, 1, 2, 5))):
        places = list(_places(changed))
        holder, key = choice.choice(places)
        kind = choice.randrange(6)
        if kind == 0 and holder is not changed:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[choice.choice((str(key) + "x", str(key)[:-1], "", str(key).upper()))] = holder.pop(key)
        elif kind == 2 and isinstance(holder, list) and holder is not changed:
            holder *= choice.choice((2, 3, 30))
        elif kind == 3:
            holder[key] = choice.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
        elif kind == 4:
            other, name = choice.choice(places)
            holder[key] = copy.deepcopy(other[name])
        else:
            holder[key] = copy.deepcopy(choice.choice(ODD))
    return changed[0]


def _places(holder: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    found = [(holder, key) for key in keys]
    for key in keys if depth < 12 else ():
        if isinstance(holder[key], dict | list):
            found += _places(holder[key], depth + 1)
    return found[:2000]


def refused(seed: int, what: Callable[[], object]) -> bool:
    """Return True if `what` raises one clear error, False if it succeeds. Any other exception fails the test."""
    try:
        what()
        return False
    except SurogateError as error:
        text = str(error)
        assert error.exit_code == 2, f"seed {seed}: exit code {error.exit_code}: {traceback.format_exc()[-3000:]}"
        assert 15 < len(text) < LONGEST_MESSAGE, f"seed {seed}: {len(text)} characters: {text[:500]}"
        return True
    except Exception:
        pytest.fail(f"seed {seed}: {traceback.format_exc()[-3000:]}")


def both_sides(outcomes: list[bool]) -> None:
    """Assert that some cases were refused and some succeeded: otherwise the damage is too strong or too weak."""
    if len(outcomes) >= 100:
        share = sum(outcomes) / len(outcomes)
        assert 0.05 < share < 0.98, f"{share:.0%} of {len(outcomes)} refused"


def of_safetensors(data: bytes, choice: random.Random) -> bytes:
    """Damage the header as JSON, or the bytes."""
    if choice.random() < 0.4:
        return of_bytes(data, choice)
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(of_json(json.loads(data[8 : 8 + size]), choice)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def of_file(path: Path, choice: random.Random) -> bytes:
    """Damage a file in a way that fits its kind."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return of_safetensors(data, choice)
    if path.suffix == ".json" and choice.random() < 0.7:
        return json.dumps(of_json(json.loads(data), choice)).encode()
    return of_bytes(data, choice)
