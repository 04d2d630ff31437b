"""Types of the values in a run's YAML file: what each accepts and what it becomes.

Numbers and booleans may be written as strings, names in any case and with `-` or `_`. A validator raises ValueError
with the end of a sentence that begins with the key: "must be a whole number".
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from surogate_core.words import fold

from .errors import FLAG_WORDS


class Keys(BaseModel):
    """Base of the themes: classes of keys of the YAML file."""

    # Validators are built on first use: most starts of the CLI never validate a theme by itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)


LARGEST_COUNT = 2**31 - 1
"""Upper bound of every `Int`: kernels count in 32 bits."""

_DTYPES = {"float32": "fp32", "torch.float32": "fp32", "bfloat16": "bf16", "torch.bfloat16": "bf16"}

# ----------------------------------------------------------------------------------------------------------- numbers


def parse_int(value: Any) -> int:
    """Accept 8, "8", 8.0 and "1e3"; refuse true and 1.5."""
    if isinstance(value, str) and len(value) <= 40:
        number = _as_float(value)
        digits = value.strip().removeprefix("-").removeprefix("+")
        value = int(value) if digits.isascii() and digits.isdigit() else number
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def parse_number(value: Any) -> float:
    """Accept a finite number or its text; refuse booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    number = _as_float(value)
    if number is None:
        raise ValueError("must be a number")
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def parse_steps(value: Any) -> int | float:
    """Accept a whole number of steps, or a part of them between 0 and 1."""
    number = parse_number(value)
    if number < 0 or not (number < 1 or number.is_integer()):
        raise ValueError("must be a whole number of steps, or a part of the run's steps below 1")
    return number if 0 < number < 1 else parse_int(value)


def parse_epochs(value: Any) -> int | float:
    """Accept a number above 0; a whole one becomes an int."""
    number = parse_number(value)
    if number <= 0:
        raise ValueError("must be a number of epochs above 0, such as 3 or 0.5")
    return int(number) if number.is_integer() else number


def count_or_auto(smallest: int) -> Callable[[Any], Any]:
    """Return a validator that accepts `auto` or a whole number of at least `smallest`."""

    def parse(value: Any) -> Any:
        if parse_word(value) == "auto":
            return "auto"
        try:
            number = parse_int(value)
        except ValueError:
            raise ValueError("must be auto or a whole number") from None
        if not smallest <= number <= LARGEST_COUNT:
            raise ValueError(f"must be auto or a whole number of at least {smallest}")
        return number

    return parse


def _as_float(value: int | float | str) -> float | None:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


# ----------------------------------------------------------------------------------------------------- flags and words


def parse_flag(value: Any) -> bool:
    """Accept a boolean, or true, yes, on, false, no, off as text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in FLAG_WORDS:
        return FLAG_WORDS[value.strip().lower()]
    raise ValueError("must be true or false")


def parse_flag_or_auto(value: Any) -> bool | Literal["auto"]:
    """Accept `auto` or a flag."""
    if parse_word(value) == "auto":
        return "auto"
    try:
        return parse_flag(value)
    except ValueError:
        raise ValueError("must be auto, true or false") from None


def flag_or_auto(value: Any) -> str:
    """Accept `auto` or a flag; return the word auto, true or false."""
    return str(parse_flag_or_auto(value)).lower()


def parse_word(value: Any) -> Any:
    """Fold the case and the hyphens of a text; return anything else as it is."""
    return fold(value) if isinstance(value, str) else value


def parse_strategy(value: Any) -> Any:
    """As `parse_word`; false, which other readers of YAML make of `no`, is `no`."""
    return "no" if value is False else parse_word(value)


def parse_kernels(value: Any) -> Any:
    """Accept compiled or allow_reference, or {kind of op: distribution} with one of the words as `default`."""
    given = dict(value) if isinstance(value, dict) else {"default": value}
    if "default" in given:
        given["default"] = parse_word(given["default"])
    texts = all(isinstance(text, str) and text for item in given.items() for text in item)
    if not texts or given.get("default", "compiled") not in ("compiled", "allow_reference"):
        raise ValueError("must be compiled, allow_reference, or a mapping of kinds of ops to packages")
    return given if isinstance(value, dict) else given["default"]


def parse_names(value: Any) -> tuple[str, ...]:
    """Accept a name or a list of names; `none` means the empty list. Duplicates are dropped, the order is kept."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError("must be a name or a list of names")
    return tuple(dict.fromkeys(entry for entry in entries if fold(entry) not in ("none", "")))


def parse_dtype(value: Any) -> Any:
    """Translate PyTorch's names of dtypes to fp32 and bf16; return anything else as it is."""
    folded = value.strip().lower() if isinstance(value, str) else value
    return _DTYPES.get(folded, folded) if isinstance(folded, str) else folded


def dtype_or_auto(value: Any) -> Any:
    """As `parse_dtype`; `auto` becomes None."""
    folded = parse_dtype(value)
    return None if folded == "auto" else folded


def recompute_word(value: Any) -> str:
    """As `flag_or_auto`; `none` is the original's word for false."""
    return "false" if parse_word(value) == "none" else flag_or_auto(value)


# ------------------------------------------------------------------------------------------------------------- bytes

_UNITS = {
    "b": 1, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_LEAST_WITHOUT_UNIT = 4096
"""Fewer bytes are a number of GiB whose unit was forgotten."""
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", re.ASCII)


def parse_bytes(value: Any) -> int:
    """Accept "24GiB", "23.5 GiB", "24GB" (24 x 10^9), and a number of bytes."""
    match = _BYTES.fullmatch(value) if isinstance(value, str) and len(value) <= 40 else None
    try:
        nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if match else parse_int(value)
    except (KeyError, ValueError):
        raise ValueError("must be a size such as 24GiB or 24GB, or a number of bytes") from None
    if not 0 < nbytes < 2**63:
        raise ValueError("must be a size of at least one byte, such as 24GiB")
    if match is None and nbytes < _LEAST_WITHOUT_UNIT:
        raise ValueError(f"is {nbytes:,} bytes. Write the unit: {nbytes}GiB, for example")
    return nbytes


def bytes_or_auto(value: Any) -> Any:
    """Accept `auto`, 0, and what `parse_bytes` does."""
    if parse_word(value) == "auto":
        return "auto"
    return 0 if value in (0, "0") and value is not False else parse_bytes(value)


def bytes_text(nbytes: int | str | None) -> str | int | None:
    """Return a size as a user writes it: in the largest binary unit that divides it, else in bytes. Words stay."""
    for unit in ("GiB", "MiB"):
        if isinstance(nbytes, int) and nbytes and nbytes % _UNITS[unit.lower()] == 0:
            return f"{nbytes // _UNITS[unit.lower()]}{unit}"
    return nbytes


# ---------------------------------------------------------------------------------------------------- text and paths


def parse_text(value: Any) -> str:
    """Accept text of 1 to 4096 characters without control characters, and whole numbers (`run_name: 7`)."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) < 10**18 else None
    if not isinstance(value, str):
        raise ValueError("must be text; put it in quotes")
    if not value.strip():
        raise ValueError("must not be empty")
    if len(value) > 4096:
        raise ValueError("must have at most 4096 characters")
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in value):
        raise ValueError("must not contain control characters or line breaks")
    return value


def parse_date(value: Any) -> str:
    """Accept a day as 2026-11-29, which YAML reads as a date."""
    with suppress(ValueError):
        if isinstance(value, str) and len(value) == len("2026-11-29"):
            value = date.fromisoformat(value)
        if type(value) is date:
            return value.isoformat()
    raise ValueError("must be a day such as 2026-11-29")


def parse_path(value: Any) -> str:
    """As `parse_text`, with `~` expanded: no shell has seen a path in YAML or in `--set`."""
    return os.path.expanduser(parse_text(value))


def parse_files(value: Any, *, folder: str = "") -> tuple[str, ...]:
    """As `parse_names`, for paths, which become absolute. folder: that of relative ones, by default the current one."""
    return tuple(os.path.abspath(os.path.join(folder, parse_path(entry))) for entry in parse_names(value))


def parse_resume(value: Any) -> bool | int | str:
    """Accept true, false, a step, `last-good`, or a path."""
    with suppress(ValueError):
        return parse_flag(value)
    if isinstance(value, str) and fold(value) == fold("last-good"):
        return "last-good"
    if isinstance(value, str) and not value.strip().isdecimal():
        return parse_path(value)
    try:
        step = parse_int(value)
    except ValueError:
        raise ValueError("must be true, false, a step, the folder of a checkpoint, or last-good") from None
    if not 1 <= step <= LARGEST_COUNT:
        raise ValueError(f"must be a step from 1 to {LARGEST_COUNT}")
    return step


Int = Annotated[int, BeforeValidator(parse_int), Field(le=LARGEST_COUNT)]
Seed = Annotated[int, BeforeValidator(parse_int), Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(parse_number)]
StepsOrPart = Annotated[int | float, BeforeValidator(parse_steps), Field(ge=0, le=LARGEST_COUNT)]
Epochs = Annotated[int | float, BeforeValidator(parse_epochs), Field(gt=0, le=LARGEST_COUNT)]
Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(bytes_text, when_used="json"),
    WithJsonSchema({"type": ["integer", "string"]}, mode="validation"),
]
BytesOrAuto = Annotated[
    int | Literal["auto"],
    BeforeValidator(bytes_or_auto),
    PlainSerializer(bytes_text, when_used="json"),
    WithJsonSchema({"type": ["integer", "string"]}, mode="validation"),
]
Flag = Annotated[bool, BeforeValidator(parse_flag)]
FlagOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(parse_flag_or_auto)]
Word = BeforeValidator(parse_word)
Strategy = BeforeValidator(parse_strategy)
Text = Annotated[str, BeforeValidator(parse_text)]
Day = Annotated[str, BeforeValidator(parse_date)]
PathText = Annotated[str, BeforeValidator(parse_path)]
PathTexts = Annotated[tuple[str, ...], BeforeValidator(parse_files)]
Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]
StorageDtype = Annotated[Literal["fp32", "bf16"], BeforeValidator(parse_dtype)]
MatmulDtype = Annotated[Literal["fp32", "bf16", "e4m3", "e2m1"], BeforeValidator(parse_dtype)]
GradientDtype = Annotated[Literal["fp32", "bf16", "e5m2", "e2m1"], BeforeValidator(parse_dtype)]
