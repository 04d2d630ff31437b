"""Pack documents into rows of `sequence_len` tokens.

A document longer than a row is split into consecutive pieces. Each piece is a document of its own: positions restart,
and its last position has no label. Pieces are packed best-fit-decreasing: longest first, each into the fullest row
that still has room. Next-fit in document order leaves 10 to 25 % of the positions empty when documents are about as
long as a row; best-fit-decreasing leaves well below 1 %. Because lengths are small integers, `_best_fit` works on
groups of equal rows instead of rows: about a second for a million documents.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from surogate_core.errors import ConfigError

from .asked import ASKS_NOTHING, Asked
from .cache import Bools, Int64s, TokenDataset
from .permute import VALIDATION, permutation
from .pieces import documents_in_row


@dataclass(frozen=True)
class Corpus:
    """Concatenated token datasets. A position is the index of a token in the concatenation."""

    datasets: tuple[TokenDataset, ...]

    @cached_property
    def bases(self) -> Int64s:
        """int64 [n_datasets + 1]: first position of each dataset, then the number of tokens."""
        return np.cumsum([0, *(dataset.n_tokens for dataset in self.datasets)], dtype=np.int64)

    @property
    def group(self) -> int:
        """Documents of a group, which stay together."""
        return self.datasets[0].group if self.datasets else 1

    @cached_property
    def document_bases(self) -> Int64s:
        """int64 [n_datasets + 1]: first document of each dataset, then the number of documents."""
        return np.cumsum([0, *(dataset.n_docs for dataset in self.datasets)], dtype=np.int64)

    @cached_property
    def bounds(self) -> Int64s:
        """int64: first position of every document, then the number of tokens."""
        starts = (dataset.offsets[:-1] + base for dataset, base in zip(self.datasets, self.bases, strict=False))
        return np.concatenate([*starts, self.bases[-1:]])

    def documents(self, starts: Int64s) -> Int64s:
        """Return [n, group]: the indices of the documents of each group, or of the document that has position i."""
        first = np.searchsorted(self.bounds, starts, side="right") - 1
        return first[:, None] + np.arange(self.group)

    def column(self, name: str, index: Int64s, bases: Int64s) -> npt.NDArray[Any]:
        """Return the numbers of a column at positions, or of documents. bases: the first of each dataset."""
        like = self.datasets[0].columns[name]
        found = np.empty((*index.shape, *like.shape[1:]), np.float32 if like.dtype.kind == "f" else np.int32)
        for own, dataset, local in self._by_dataset(index, bases):
            found[own] = dataset.column_at(name, local)
        return found

    def fill(self, name: str, index: Int64s, numbers: npt.NDArray[Any]) -> None:
        """Set the numbers of a column of documents."""
        for own, dataset, local in self._by_dataset(index, self.document_bases):
            dataset.columns[name][local] = numbers[own]

    def read(self, positions: Int64s) -> tuple[npt.NDArray[np.int32], Bools]:
        """Return the tokens at `positions`, and whether each is trained."""
        tokens = np.empty(len(positions), np.int32)
        trained = np.empty(len(positions), np.bool_)
        for own, dataset, local in self._by_dataset(positions, self.bases):
            tokens[own] = dataset.tokens_at(local)
            trained[own] = dataset.trained_at(local)
        return tokens, trained

    def _by_dataset(self, index: Int64s, bases: Int64s) -> Iterator[tuple[Bools | slice, TokenDataset, Int64s]]:
        """Yield which entries of `index` lie in a dataset, the dataset, and these entries counted from its first."""
        if len(self.datasets) == 1:
            yield slice(None), self.datasets[0], index
            return
        owners = np.searchsorted(bases, index, side="right") - 1
        for owner in np.unique(owners):
            own = owners == owner
            yield own, self.datasets[owner], index[own] - bases[owner]


@dataclass(frozen=True)
class DocumentSpans:
    """Documents, or parts of them, as ranges of positions of a corpus; no token is copied.

    start, stop: int64 [n], ascending. whole: bool [n], documents that must not be split.
    """

    corpus: Corpus
    start: Int64s
    stop: Int64s
    whole: Bools

    @classmethod
    def of(cls, datasets: Sequence[TokenDataset]) -> DocumentSpans:
        """Return every document of `datasets`, or every group of them, in order."""
        corpus = Corpus(tuple(datasets))
        pairs = list(zip(datasets, corpus.bases, strict=False))
        starts = [dataset.offsets[:-1][:: dataset.group] + base for dataset, base in pairs]
        stops = [dataset.offsets[dataset.group :: dataset.group] + base for dataset, base in pairs]
        start = np.concatenate([np.zeros(0, np.int64), *starts])
        stop = np.concatenate([np.zeros(0, np.int64), *stops])
        return cls(corpus, start, stop, np.zeros(len(start), np.bool_))

    @classmethod
    def joined(cls, parts: Sequence[DocumentSpans]) -> DocumentSpans:
        """Return the documents of all parts, in order. Each part has its own corpus."""
        corpus = Corpus(tuple(dataset for part in parts for dataset in part.corpus.datasets))
        bases = np.cumsum([0, *(part.corpus.bases[-1] for part in parts)])[:-1]
        none = np.zeros(0, np.int64)
        return cls(
            corpus,
            np.concatenate([none, *(part.start + base for part, base in zip(parts, bases, strict=True))]),
            np.concatenate([none, *(part.stop + base for part, base in zip(parts, bases, strict=True))]),
            np.concatenate([np.zeros(0, np.bool_), *(part.whole for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.start)

    @property
    def n_tokens(self) -> int:
        return int((self.stop - self.start).sum())


def split_validation(
    documents: DocumentSpans, ratio: float, seed: int, piece: int = 1
) -> tuple[DocumentSpans, DocumentSpans]:
    """Return (training, validation), the latter with round(ratio * tokens) tokens.

    Documents are shuffled by `seed`; the last ones are for validation. The document at the boundary is cut: its head is
    trained, its tail held out. A single document is thus validated on its tail. Pieces of `piece` tokens, and a
    document that must stay whole, go to the side of their larger part.
    """
    if not 0 <= ratio < 1:
        raise ConfigError(f"validation_split_ratio: {ratio} must be at least 0 and less than 1.")
    held_out = round(ratio * documents.n_tokens)
    order = permutation(len(documents), seed, purpose=VALIDATION)
    start, stop, whole = documents.start[order], documents.stop[order], documents.whole[order]
    ends = np.cumsum(stop - start)
    first_held_out = documents.n_tokens - held_out
    # the boundary in each document: before it training, after it validation
    cut = stop - np.clip(ends - first_held_out, 0, stop - start)
    size = np.where(whole, stop - start, piece)
    lower = start + (cut - start) // size * size
    upper = np.minimum(lower + size, stop)
    cut = np.where(cut - lower >= upper - cut, upper, lower)
    return _spans(documents.corpus, start, cut, whole), _spans(documents.corpus, cut, stop, whole)


def _spans(corpus: Corpus, start: Int64s, stop: Int64s, whole: Bools) -> DocumentSpans:
    keep = np.flatnonzero(stop > start)
    order = keep[np.argsort(start[keep], kind="stable")]
    return DocumentSpans(corpus, start[order], stop[order], whole[order])


@dataclass(frozen=True)
class PackedRows:
    """Rows of `sequence_len` tokens. Row r holds the pieces row_offsets[r] to row_offsets[r + 1], in this order.

    A piece is a document, a part of one, or a group of documents, which are adjacent in the corpus.

    start, stop: int64 [n_pieces], positions of the corpus. max_documents: upper bound of the documents in a row, with
    its padding counted as one. asked: what the loss reads.
    """

    corpus: Corpus
    sequence_len: int
    start: Int64s
    stop: Int64s
    row_offsets: Int64s
    max_documents: int
    asked: Asked = ASKS_NOTHING

    @property
    def n_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def n_tokens(self) -> int:
        """Positions that are not padding."""
        return int((self.stop - self.start).sum())

    def documents(self, chosen: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return of each document of rows: its row among `chosen`, and its first and last positions in the corpus."""
        first, last = self.row_offsets[chosen], self.row_offsets[chosen + 1]
        piece = ranges(first, last - first)
        row, start, stop = np.repeat(np.arange(len(chosen)), last - first), self.start[piece], self.stop[piece]
        if self.corpus.group == 1:
            return row, start, stop
        index = self.corpus.documents(start).ravel()
        return np.repeat(row, self.corpus.group), self.corpus.bounds[index], self.corpus.bounds[index + 1]


def pack(
    documents: DocumentSpans, sequence_len: int, sample_packing: bool = True, asked: Asked = ASKS_NOTHING
) -> PackedRows:
    """Split documents into pieces and pack them into rows; without `sample_packing`, a row holds one piece.

    Pieces of one token have no label and are left out. Deterministic.
    """
    if sequence_len < 2:
        raise ConfigError(f"sequence_len: {sequence_len} leaves no token to predict. Give 2 or more.")
    start, stop = _split(documents, sequence_len)
    group = documents.corpus.group
    most = documents_in_row(sequence_len, sample_packing, group)
    limit = (most - 1) // group
    row = _best_fit(stop - start, sequence_len, limit) if sample_packing else np.arange(len(start))
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=0) if len(row) else np.zeros(0, np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return PackedRows(documents.corpus, sequence_len, start[order], stop[order], offsets, most, asked)


def _split(documents: DocumentSpans, sequence_len: int) -> tuple[Int64s, Int64s]:
    """Return (start, stop) of the pieces, of two to `sequence_len` tokens each."""
    pieces = -(-(documents.stop - documents.start) // sequence_len)
    first = np.cumsum(pieces) - pieces
    nth = np.arange(int(pieces.sum())) - np.repeat(first, pieces)
    start = np.repeat(documents.start, pieces) + nth * sequence_len
    stop = np.minimum(start + sequence_len, np.repeat(documents.stop, pieces))
    keep = stop - start > 1
    return start[keep], stop[keep]


def _best_fit(lengths: Int64s, capacity: int, limit: int) -> Int64s:
    """Return the row of each piece by best-fit-decreasing.

    The result equals placing the pieces one by one, longest first, each into the row with the least sufficient room,
    or into a new row. A row with `limit` pieces is closed. Rows with equal room form a group. Pieces of equal length go
    to the group with the least sufficient room; each of its rows takes pieces until it is too full, since it remains
    the best fit. The work is therefore per (length, group), not per piece.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), np.int64)
    groups = _Groups()
    n_rows = placed = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            taken = groups.take(size)
            if taken is None:
                per_row = min(capacity // size, limit)
                fresh = -(-(end - placed) // per_row)
                room, rows, fill = capacity, np.arange(n_rows, n_rows + fresh), np.zeros(fresh, np.int64)
                n_rows += fresh
            else:
                room, rows, fill = taken
            share = np.minimum(room // size, limit - fill)
            before = np.cumsum(share) - share
            share = np.clip(end - placed - before, 0, share)
            total = int(share.sum())
            row_of[order[placed : placed + total]] = np.repeat(rows, share)
            placed += total
            fill = fill + share
            for pieces in np.unique(share).tolist():
                chosen = (share == pieces) & (fill < limit)
                groups.put(room - pieces * size, rows[chosen], fill[chosen])
    return row_of


class _Groups:
    """Open rows, grouped by remaining room: row numbers, and the number of pieces in each."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._members: dict[int, list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = {}

    def take(self, size: int) -> tuple[int, Int64s, Int64s] | None:
        """Remove and return the group with the least room that is at least `size`."""
        at = bisect.bisect_left(self._rooms, size)
        if at == len(self._rooms):
            return None
        room = self._rooms.pop(at)
        parts = self._members.pop(room)
        return room, np.concatenate([rows for rows, _ in parts]), np.concatenate([fill for _, fill in parts])

    def put(self, room: int, rows: Int64s, fill: Int64s) -> None:
        """Add rows with `room` positions left. With less than 2 they are closed: no piece is shorter."""
        if room < 2 or len(rows) == 0:
            return
        if room not in self._members:
            bisect.insort(self._rooms, room)
            self._members[room] = []
        self._members[room].append((rows, fill))


def ranges(start: Int64s, length: Int64s) -> Int64s:
    """Return the concatenation of range(start[i], start[i] + length[i]) over all i."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    ranges: Int64s = np.arange(total) + np.repeat(start - (ends - length), length)
    return ranges
