"""The documents that a run trains: weighted, cut to a row, and counted where they occur more than once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from surogate_core.errors import ConfigError

from .pack import DocumentSpans
from .permute import WEIGHTS, permutation

Strategy = Literal["delete", "left", "right", "split"]


def truncate(
    documents: DocumentSpans, sequence_len: int, strategy: Strategy, where: str, notice: Callable[[str], None]
) -> DocumentSpans:
    """Return those of one dataset's documents of at most `sequence_len` tokens, which packing must not split.

    strategy: "delete" drops longer documents, "left" and "right" cut off that end, "split" returns all documents
    unchanged, for packing to split. A document that has no label after the cut is dropped. `notice` reports the losses.
    """
    if strategy == "split":
        return documents
    length = documents.stop - documents.start
    too_long = length > sequence_len
    start, stop = documents.start, documents.stop
    if strategy == "left":
        start = np.where(too_long, stop - sequence_len, start)
    elif strategy == "right":
        stop = np.where(too_long, start + sequence_len, stop)
    keep = ~too_long if strategy == "delete" else np.ones(len(start), np.bool_)
    unlabelled = np.zeros(len(start), np.bool_)
    for at in np.flatnonzero(too_long & keep):
        unlabelled[at] = not documents.corpus.read(np.arange(start[at] + 1, stop[at]))[1].any()
    keep &= ~unlabelled
    if too_long.any():
        longest = documents.corpus.datasets[0].where(documents.corpus.group * int(length.argmax()))
        notice(
            f"{where}: {_share(too_long, documents)} longer than sequence_len ({sequence_len}; the longest, "
            f"{longest}, has {length.max():,} tokens): "
            + ("left out" if strategy == "delete" else f"cut at the {strategy}")
            + (f", {int(unlabelled.sum()):,} of them left out with nothing to train" if unlabelled.any() else "")
        )
    return replace(documents, start=start[keep], stop=stop[keep], whole=np.ones(int(keep.sum()), np.bool_))


def _share(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]], documents: DocumentSpans) -> str:
    count, group = int(chosen.sum()), documents.corpus.group
    unit = "documents" if group == 1 else f"groups of {group} documents"
    return f"{count:,} of {len(documents):,} {unit} ({count / len(documents):.1%}) {'is' if count == 1 else 'are'}"


def weigh(documents: DocumentSpans, weights: Sequence[float], seed: int) -> DocumentSpans:
    """Repeat the documents of dataset i `weights[i]` times: 2.5 is each document twice and a random half once more.

    The fraction counts documents, not tokens; `seed` determines which ones are chosen. Raises ConfigError if no
    document of a dataset remains.
    """
    if all(weight == 1 for weight in weights):
        return documents
    owners = np.searchsorted(documents.corpus.bases, documents.start, side="right") - 1
    chosen = []
    for index, weight in enumerate(weights):
        own = np.flatnonzero(owners == index)
        copies, rest = divmod(round(weight * len(own)), max(len(own), 1))
        if len(own) and copies == rest == 0:
            raise ConfigError(
                f"datasets.{index}: weight: {weight:g} of {len(own):,} documents is none. Raise it, or remove it."
            )
        chosen += [own] * copies + [own[np.sort(permutation(len(own), seed, index, WEIGHTS)[:rest])]]
    order = np.concatenate(chosen)
    order = order[np.argsort(documents.start[order], kind="stable")]
    return replace(documents, start=documents.start[order], stop=documents.stop[order], whole=documents.whole[order])


def duplicates(documents: DocumentSpans, train: DocumentSpans, validation: DocumentSpans) -> str | None:
    """Return a line that counts equal documents, and those of the validation set that are trained too; None if none.

    documents: all documents of `datasets`. A document counts if its start is in the spans: the second part of a
    document that is cut is no document of its own.
    """
    every, held_out = _hashes(documents), _hashes(validation)
    repeated = len(every) - len(np.unique(every))
    trained = int(np.count_nonzero(np.isin(held_out, _hashes(train))))
    parts = [f"{repeated:,} of {len(every):,} documents are duplicates"] if repeated else []
    parts += [f"{trained:,} of {len(held_out):,} in the validation set are trained too"] if trained else []
    return "; ".join(parts) or None


def _hashes(documents: DocumentSpans) -> npt.NDArray[np.uint64]:
    """Return the hashes, uint64, of the documents whose start is in `documents`."""
    found = [np.zeros(0, np.uint64)]
    bases = documents.corpus.bases
    for dataset, base, end in zip(documents.corpus.datasets, bases, bases[1:], strict=False):
        first, last = np.searchsorted(documents.start, [base, end])
        starts = documents.start[first:last] - base
        index = np.searchsorted(dataset.offsets, starts)
        found.append(dataset.hashes[index[dataset.offsets[index] == starts]])
    return np.concatenate(found)
