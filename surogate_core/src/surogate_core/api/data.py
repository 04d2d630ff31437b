"""Types of datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from .base import Definition


@dataclass(frozen=True)
class Encoded:
    """One document: token ids, and for each whether the model is trained to produce it."""

    tokens: Sequence[int]
    trained: Sequence[bool]


@dataclass(frozen=True, kw_only=True)
class DatasetFormatDef(Definition):
    """How a row of a dataset becomes a document.

    options     pydantic model of this type's keys inside a `datasets:` entry ("text_field" ...)
    matches     column names -> whether `type: auto` should take this format
    encode      (row, tokenizer, options) -> Encoded. The tokenizer is a `tokenizers.Tokenizer`-backed object with
                `encode_ids(text) -> list[int]`, `bos_id`, `eos_id` (None when the tokenizer has none).
    fields      (options) -> names of the columns that `encode` reads
    guess       column names -> the keys that `type: auto` sets where the entry does not
    truncation  what becomes of a document longer than a row: "split", or "delete" where its parts mean nothing alone
    """

    name: str
    summary: str
    options: type[BaseModel]
    matches: Callable[[Sequence[str]], bool]
    fields: Callable[[Any], Sequence[str]]
    encode: Callable[[Mapping[str, Any], Any, Any], Encoded]
    guess: Callable[[Sequence[str]], Mapping[str, Any]] = field(default=lambda columns: {})
    truncation: Literal["split", "delete"] = "split"
