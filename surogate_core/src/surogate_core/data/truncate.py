"""Shorten or drop documents that are longer than a row, and drop those that then have no label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from .pack import DocumentSpans

Strategy = Literal["delete", "left", "right", "split"]


def truncate(
    documents: DocumentSpans, sequence_len: int, strategy: Strategy, where: str, notice: Callable[[str], None]
) -> DocumentSpans:
    """Return documents of at most `sequence_len` tokens, which packing must not split.

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
        notice(
            f"{where}: {_share(too_long, documents)} longer than sequence_len ({sequence_len}; the longest has "
            f"{length.max():,} tokens): "
            + ("left out" if strategy == "delete" else f"cut at the {strategy}")
            + (f", {int(unlabelled.sum()):,} of them left out with nothing to train" if unlabelled.any() else "")
        )
    return replace(documents, start=start[keep], stop=stop[keep], whole=np.ones(int(keep.sum()), np.bool_))


def _share(chosen: np.ndarray[tuple[int], np.dtype[np.bool_]], documents: DocumentSpans) -> str:
    count, group = int(chosen.sum()), documents.corpus.group
    unit = "documents" if group == 1 else f"groups of {group} documents"
    return f"{count:,} of {len(documents):,} {unit} ({count / len(documents):.1%}) {'is' if count == 1 else 'are'}"
