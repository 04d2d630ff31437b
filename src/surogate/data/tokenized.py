"""The result of `surogate tokenize`: counts of the data of a run, how its rows are packed, and some documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from surogate_core.api import Encoded

from ..config.dataset_entry import DatasetEntry
from ..config.load import LoadedConfig
from .cache import TokenDataset
from .chat.row_tokenizer import RowTokenizer
from .chat.token_spans import runs
from .corpora import Corpora
from .left_out import LeftOut, left_out
from .pack import PackedRows

LENGTHS: Final = ("shortest", "median", "percentile_99", "longest")
_BINS: Final = 28
_SHOWN_ROWS: Final = 12
"""Rows whose packing is told."""

Found = tuple[int, str, DatasetEntry, int, int]
"""A document of the training data: its number, the place of its row, its entry, and where it starts and stops."""


@dataclass(frozen=True, kw_only=True)
class TokenizedDataset:
    """An entry of `datasets` or `validation_datasets`, before anything is held out or cut.

    documents  of `tokens` tokens, of which `trained` are labels
    group      documents of a row that stay together: 2 of a pair
    columns    [least, largest] number of each column of the type
    lengths    "shortest", "median", "percentile_99" and "longest" document, in tokens
    histogram  [least, most, count] of ranges of lengths in tokens, of whole groups
    left_out   what no row of the run has, and why
    cache      the folder that the tokens are in
    """

    path: str
    type: str
    documents: int
    tokens: int
    trained: int
    group: int
    columns: Mapping[str, Sequence[float]]
    lengths: Mapping[str, int]
    histogram: Sequence[Sequence[int]]
    left_out: Sequence[LeftOut]
    cache: Path | None


@dataclass(frozen=True, kw_only=True)
class PackedFacts:
    """The rows of `sequence_len` tokens that a run reads.

    tokens      in all rows, without padding
    padding     the share of positions that hold none
    first_rows  [tokens, labels] of each piece of the first rows
    """

    rows: int
    tokens: int
    sequence_len: int
    padding: float
    documents_per_row: float
    first_rows: Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Piece:
    """A part of a document that is trained, or masked."""

    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True)
class ShownDocument:
    """A document as the rows of the run have it.

    document      its number, from 1
    row           the place of its row, such as chats.jsonl:7
    whole_tokens  of the document, of which a row may have a part
    tokens        of `pieces`
    """

    document: int
    row: str
    path: str
    type: str
    whole_tokens: int
    tokens: int
    pieces: Sequence[Piece]


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """The data of a run, as `surogate tokenize --json` prints it.

    defaults   the verb whose defaults are taken
    rows       "train", and "validate" if rows are held out
    documents  of each entry the shortest, the median and the longest; none if they were not asked for
    """

    defaults: str
    datasets: Sequence[TokenizedDataset]
    rows: Mapping[str, PackedFacts]
    documents: Sequence[ShownDocument] = ()


def tokenized(loaded: LoadedConfig, data: Corpora, shown: Sequence[Found]) -> Tokenized:
    """Return the result for data, with the documents `shown`."""
    return Tokenized(
        defaults=loaded.mode,
        datasets=[
            TokenizedDataset(
                path=entry.path,
                type=entry.type,
                documents=dataset.n_docs,
                tokens=dataset.n_tokens,
                trained=dataset.n_trained,
                group=dataset.group,
                columns={name: [float(n.min()), float(n.max())] for name, n in dataset.columns.items()},
                lengths=dict(zip(LENGTHS, lengths(dataset), strict=True)),
                histogram=_histogram(dataset),
                left_out=missing,
                cache=dataset.path,
            )
            for entry, dataset, missing in _with_left_out(loaded, data)
        ],
        rows={
            name: PackedFacts(
                rows=found.n_rows,
                tokens=found.n_tokens,
                sequence_len=found.sequence_len,
                padding=1 - found.n_tokens / (found.n_rows * found.sequence_len),
                documents_per_row=len(found.start) * found.corpus.group / found.n_rows,
                first_rows=_first_rows(found),
            )
            for name, found in parts(data).items()
        },
        documents=[_shown(data, *found) for found in shown],
    )


def _shown(data: Corpora, number: int, where: str, entry: DatasetEntry, start: int, stop: int) -> ShownDocument:
    document = read(data, start, stop)
    return ShownDocument(
        document=number,
        row=where,
        path=entry.path,
        type=entry.type,
        whole_tokens=whole(data, number),
        tokens=len(document.tokens),
        pieces=pieces(document, data.tokenizer),
    )


def read(data: Corpora, start: int, stop: int) -> Encoded:
    """Return the training data at positions `start` to `stop`."""
    return Encoded(*(part.tolist() for part in data.train.corpus.read(np.arange(start, stop))))


def pieces(document: Encoded, tokenizer: RowTokenizer) -> list[Piece]:
    """Return the text of a document in pieces that are trained or masked."""
    return [Piece(text, trained) for text, trained in runs(document, tokenizer)]


def _with_left_out(loaded: LoadedConfig, data: Corpora) -> Iterator[tuple[DatasetEntry, TokenDataset, list[LeftOut]]]:
    """Yield each entry with its tokens and what no row of the run has of them."""
    corpus = data.train.corpus
    rows = [part for part in parts(data).values() if part.corpus is corpus]
    for entry, dataset, base in zip(loaded.config.datasets, corpus.datasets, corpus.bases[:-1].tolist(), strict=True):
        yield entry, dataset, left_out(dataset, base, rows, entry.weight)
    if loaded.config.validation_datasets and data.validation is not None:
        corpus = data.validation.corpus
        entries = zip(loaded.config.validation_datasets, corpus.datasets, corpus.bases[:-1].tolist(), strict=True)
        for entry, dataset, base in entries:
            yield entry, dataset, left_out(dataset, base, [data.validation], None)


def _histogram(dataset: TokenDataset) -> list[list[int]]:
    """Return [least, most, count] of ranges of lengths in tokens, each a constant factor wide."""
    lengths = np.diff(dataset.offsets[:: dataset.group])
    edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, _BINS + 1).round().astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return [[int(a), int(b) - 1, int(n)] for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def _first_rows(rows: PackedRows) -> list[list[list[int]]]:
    """Return [tokens, trained tokens] of each piece of the first rows, as they are packed."""
    found = []
    for row in range(min(rows.n_rows, _SHOWN_ROWS)):
        pieces = range(rows.row_offsets[row], rows.row_offsets[row + 1])
        spans = [np.arange(rows.start[piece], rows.stop[piece]) for piece in pieces]
        found.append([[len(span), int(rows.corpus.read(span)[1].sum())] for span in spans])
    return found


def parts(data: Corpora) -> dict[str, PackedRows]:
    return {"train": data.train} | ({"validate": data.validation} if data.validation else {})


def lengths(dataset: TokenDataset) -> list[int]:
    found: list[int] = np.percentile(np.diff(dataset.offsets), [0, 50, 99, 100], method="nearest").tolist()
    return found


def documents(loaded: LoadedConfig, data: Corpora) -> Iterator[Found]:
    """Yield the shortest, the median and the longest document of each entry, as the rows of the run have them.

    A document that is left out or held out is in none; of one that is cut, a row has a part.
    """
    corpus = data.train.corpus
    _, starts, stops = data.train.documents(np.arange(data.train.n_rows))
    starts, first = np.unique(starts, return_index=True)
    stops = stops[first]
    bases = zip(corpus.bases, corpus.bases[1:], corpus.document_bases, strict=False)
    for entry, dataset, (base, end, before) in zip(loaded.config.datasets, corpus.datasets, bases, strict=True):
        own = slice(*np.searchsorted(starts, [base, end]))
        by_length = np.argsort(stops[own] - starts[own], kind="stable")
        for at in dict.fromkeys(by_length[[0, len(by_length) // 2, -1]].tolist() if len(by_length) else ()):
            start, stop = int(starts[own][at]), int(stops[own][at])
            number = int(corpus.documents(np.array([start]))[0, 0])
            yield number + 1, dataset.where(number - int(before)), entry, start, stop


def whole(data: Corpora, number: int) -> int:
    """Return the tokens of a document, of which a row may have a part."""
    start, stop = data.train.corpus.bounds[number - 1 : number + 1].tolist()
    return int(stop - start)
