"""Dataset types: how rows become documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, Literal, Protocol

from ..origin import Declared, Definition, Name
from .base import Options


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
class Column(Declared):
    """Numbers that come with documents, for each token or for each document. A dataset type gives one, in fp32; what a
    loss makes (`LossDef.prepare`) has a `dtype`, and a `shape` per token.
    """

    name: Name
    per: Literal["token", "document"] = "token"
    _: KW_ONLY
    shape: tuple[int, ...] = ()
    dtype: Literal["fp32", "int32"] = "fp32"


@dataclass(frozen=True)
class Encoded:
    """A document: token ids, and for each token whether the model is trained to produce it.

    columns     the numbers of each column that the type declares: a list with one per token, or one number
    omissions   parts of the row that are missing
    left_out    why a row that is not empty has no tokens. Such rows are counted, and reported before training.
    """

    tokens: Sequence[int]
    trained: Sequence[bool]
    _: KW_ONLY
    omissions: Sequence[Omission] = ()
    left_out: str = ""
    columns: Mapping[str, Sequence[float] | float] = field(default_factory=dict)


class Tokenizer(Protocol):
    """The tokenizer of a model, by a `tokenizers.Tokenizer`. Ids are None where it has no such token."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool:
        """Whether it starts every text with bos."""

    def encode_ids(self, text: str) -> list[int]:
        """Return the tokens of `text` without bos and eos. Special tokens in the text are recognised."""

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return `encode_ids`, and of each token its first character and the one after its last."""

    def encode_conversation(self, row: Mapping[str, Any], **options: Any) -> Encoded:
        """Return what the dataset type `conversation` with these options makes of a row."""


@dataclass(frozen=True, kw_only=True)
class DatasetFormatDef(Definition, Generic[Options]):
    """A dataset type: how a row becomes a document.

    options     pydantic model of the type's keys in an entry of `datasets:` ("text_field" ...)
    matches     (names of the columns with content in at least one row) -> whether `type: auto` should select this type
    encode      (row, tokenizer, options) -> Encoded; of a type with groups `group_size` of them, each with a trained
                token after its first, or one that is left out
    fields      (options) -> names of the columns that `encode` reads
    optional    (options) -> those of `fields` that a row may lack; `encode` then gets None
    found       (the same names as `matches`) -> keys that the type sets if the entry does not
    guess       (the same names) -> further keys that only `type: auto` sets
    truncation  what to do with a document longer than a row: "split", or "delete" if its parts are useless alone
    columns     what `Encoded.columns` of each document has
    group_size  documents of a row, which stay together: losses take them as a group
    version     raised whenever the same row and options give other tokens than before. Cached tokens of another version
                are made anew, and a resumed run whose tokens would change is refused
    mended      version -> the fault that it mended, for that refusal ("a prompt that ends with an answer was trained")
    encode_part (row, tokenizer, options, is first, is last) -> Encoded: `encode` of a part of a .txt file that is one
                document, whose parts are tokenized one by one; only the first may be refused. For types without
                `columns` and groups. None: files are read whole, up to 2 GiB
    """

    name: Name
    summary: str
    options: type[Options]
    matches: Callable[[Sequence[str]], bool]
    fields: Callable[[Options], Sequence[str]]
    encode: Callable[[Mapping[str, Any], Tokenizer, Options], Encoded | Sequence[Encoded]]
    found: Callable[[Sequence[str]], Mapping[str, Any]] = field(default=lambda columns: {})
    guess: Callable[[Sequence[str]], Mapping[str, Any]] = field(default=lambda columns: {})
    truncation: Literal["split", "delete"] = "split"
    optional: Callable[[Options], Sequence[str]] = field(default=lambda options: ())
    columns: Sequence[Column] = ()
    group_size: int = 1
    version: int = 1
    mended: Mapping[int, str] = field(default_factory=dict)
    encode_part: Callable[[Mapping[str, Any], Tokenizer, Options, bool, bool], Encoded] | None = None
