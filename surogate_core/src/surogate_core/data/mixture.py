"""Weights of datasets: how often an epoch trains each document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import ConfigError
from .pack import DocumentSpans
from .permute import WEIGHTS, permutation


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
