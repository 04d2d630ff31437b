"""The data that a run does not train, as it follows from the tokens and the packed rows: how much, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cache import TokenDataset
from .pack import PackedRows


@dataclass(frozen=True)
class LeftOut:
    """In `count` of `of` units ("rows", "answers", "documents", "pairs"), the part `what` is missing; "": all of it.

    why     the reason
    first   place of the first row that has it, such as rows.jsonl:7; "" if it is not known
    tokens  tokens that are missing; None if they were never made
    """

    count: int
    of: int
    unit: str
    what: str
    why: str
    first: str = ""
    tokens: int | None = None


def left_out(dataset: TokenDataset, base: int, parts: Sequence[PackedRows], weight: float | None) -> list[LeftOut]:
    """Return all that is missing of a dataset.

    base: its first position in the corpus. parts: all rows with that corpus, to train and to validate. weight: how
    often each document is repeated; None: once.
    """
    found = [LeftOut(o.count, o.of, o.unit, o.what, o.why, first) for o, first in dataset.omissions if o.count]
    documents = dataset.n_docs // dataset.group
    if dataset.empty_rows:
        refused = sum(one.count for one in found if one.unit == "rows" and not one.what)
        rows = documents + dataset.empty_rows + refused
        found.append(LeftOut(dataset.empty_rows, rows, "rows", "", "the row is empty"))
    return [*found, *_of_documents(dataset, base, parts, weight)]


def _of_documents(
    dataset: TokenDataset, base: int, parts: Sequence[PackedRows], weight: float | None
) -> Iterator[LeftOut]:
    bounds = dataset.offsets[:: dataset.group]
    length, held = np.diff(bounds), _held(bounds, base, parts)
    unit = {1: "documents", 2: "pairs"}.get(dataset.group, f"groups of {dataset.group} documents")
    most = max(rows.sequence_len for rows in parts)
    long, none, cut = length > most, held == 0, (held > 0) & (held < length)
    cuts = bool((long & ~none).any())
    why = f"nothing of it is trained after the cut to sequence_len ({most})" if cuts else _longer(most)
    drawn = "a document of one token has no label"
    if weight is not None and weight < 1:
        drawn = f"weight: {weight:g} does not draw it"
    for chosen, what, reason in (
        (long & none, "", why),
        (cut, "a part", f"{_longer(most)}, and is cut"),
        (~long & none, "", drawn),
    ):
        if chosen.any():
            first = dataset.where(int(chosen.argmax()) * dataset.group)
            missing = int((length - held)[chosen].sum())
            yield LeftOut(int(chosen.sum()), len(length), unit, what, reason, first, missing)


def _longer(most: int) -> str:
    return f"longer than sequence_len ({most})"


def _held(bounds: npt.NDArray[np.int64], base: int, parts: Sequence[PackedRows]) -> npt.NDArray[np.int64]:
    """Return how many tokens of each document, or group of documents, some row has. Repeated ones count once."""
    held = np.zeros(len(bounds) - 1, np.int64)
    starts, stops = (np.concatenate([getattr(rows, of) for rows in parts]) for of in ("start", "stop"))
    starts, first = np.unique(starts, return_index=True)
    stops = stops[first]
    own = slice(*np.searchsorted(starts, [base, base + bounds[-1]]))
    at = np.searchsorted(bounds, starts[own] - base, side="right") - 1
    np.add.at(held, at, stops[own] - starts[own])
    return held
