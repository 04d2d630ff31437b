"""Types of datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from ..origin import Definition


@dataclass(frozen=True)
class Omission:
    """Something in a row that is not in its tokens, or not trained as the row says.

    `count` of `of` things of the kind `unit` ("answers", "rows"): their part `what` ("the reasoning") is missing, for
    the reason `why`. Omissions that differ only in their counts are added up over a dataset and printed before
    training, so none of the texts may quote the row.
    """

    what: str
    unit: str
    why: str
    count: int = 1
    of: int = 1


@dataclass(frozen=True)
class Encoded:
    """One document: token ids, and for each whether the model is trained to produce it.

    omissions   what of the row is not in the tokens
    left_out    why a row has no tokens though it is not empty: such rows are counted and printed before training
    """

    tokens: Sequence[int]
    trained: Sequence[bool]
    omissions: Sequence[Omission] = ()
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class DatasetFormatDef(Definition):
    """How a row of a dataset becomes a document.

    options     pydantic model of this type's keys inside a `datasets:` entry ("text_field" ...)
    matches     names of the columns that hold something in any row -> whether `type: auto` should take this format
    encode      (row, tokenizer, options) -> Encoded. The tokenizer is a `tokenizers.Tokenizer`-backed object with
                `encode_ids(text) -> list[int]`, `bos_id`, `eos_id` (None when the tokenizer has none).
    fields      (options) -> names of the columns that `encode` reads
    optional    (options) -> those of `fields` that a row may lack; `encode` then finds None
    guess       the same names -> the keys that `type: auto` sets where the entry does not
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
    optional: Callable[[Any], Sequence[str]] = field(default=lambda options: ())
