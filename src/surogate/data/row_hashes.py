"""Hashes of the rows of a run: of what is in them, and of which caches it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from .pack import PackedRows


def content_hash(rows: PackedRows) -> str:
    """Return a hash of the tokens of each document, of labels, and of the columns of dataset types, in their rows.

    Columns that a loss makes have facts of their own.
    """
    parts: list[npt.NDArray[np.generic]] = []
    for dataset in rows.corpus.datasets:
        names = [] if dataset.facts else sorted(dataset.columns)
        documents = dataset.hashes if len(dataset.hashes) else dataset.tokens
        parts += [documents, dataset.offsets, dataset.mask, *(dataset.columns[name] for name in names)]
    return _hash((np.ascontiguousarray(part).data for part in parts), rows)


def caches_hash(rows: PackedRows, names: Sequence[str] | None = None) -> str:
    """Return a hash of which tokens of which cache lie in which row. names: other names of the caches."""
    sets = rows.corpus.datasets
    called = names or [each.path.name if each.path else "" for each in sets]
    return _hash((f"{name} {each.n_tokens}\n".encode() for name, each in zip(called, sets, strict=True)), rows)


def _hash(parts: Iterable[bytes | memoryview], rows: PackedRows) -> str:
    """Return a hash of `parts` and of where the rows are in them."""
    digest = xxh3_128()
    for part in (*parts, *(np.ascontiguousarray(part).data for part in (rows.start, rows.stop, rows.row_offsets))):
        digest.update(part)
    return digest.hexdigest()[:16]
