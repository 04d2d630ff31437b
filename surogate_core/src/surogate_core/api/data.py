"""Dataset types: how rows become documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from ..origin import Definition, Name


@dataclass(frozen=True)
class Omission:
    """A part of a row that is missing from its tokens, or is not trained although the row asks for it.

    In `count` of `of` units ("answers", "rows"), the part `what` ("the reasoning") is missing, for the reason `why`.
    Omissions that differ only in their counts are summed over a dataset and printed before training, so the texts must
    not quote the row.
    """

    what: str
    unit: str
    why: str
    count: int = 1
    of: int = 1


@dataclass(frozen=True)
class Encoded:
    """A document: token ids, and for each token whether the model is trained to produce it.

    omissions   parts of the row that are missing
    left_out    why a row that is not empty has no tokens. Such rows are counted, and reported before training.
    """

    tokens: Sequence[int]
    trained: Sequence[bool]
    omissions: Sequence[Omission] = ()
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class DatasetFormatDef(Definition):
    """A dataset type: how a row becomes a document.

    options     pydantic model of the type's keys in an entry of `datasets:` ("text_field" ...)
    matches     (names of the columns with content in at least one row) -> whether `type: auto` should select this type
    encode      (row, tokenizer, options) -> Encoded. The tokenizer is backed by a `tokenizers.Tokenizer` and has
                `encode_ids(text) -> list[int]`, `bos_id` and `eos_id` (None if the tokenizer has none).
    fields      (options) -> names of the columns that `encode` reads
    optional    (options) -> those of `fields` that a row may lack; `encode` then gets None
    guess       (the same names as `matches`) -> keys that `type: auto` sets if the entry does not
    truncation  what to do with a document longer than a row: "split", or "delete" if its parts are useless alone
    """

    name: Name
    summary: str
    options: type[BaseModel]
    matches: Callable[[Sequence[str]], bool]
    fields: Callable[[Any], Sequence[str]]
    encode: Callable[[Mapping[str, Any], Any, Any], Encoded]
    guess: Callable[[Sequence[str]], Mapping[str, Any]] = field(default=lambda columns: {})
    truncation: Literal["split", "delete"] = "split"
    optional: Callable[[Any], Sequence[str]] = field(default=lambda options: ())
