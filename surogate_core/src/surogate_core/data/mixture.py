"""How often an epoch sees each data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import ConfigError
from .pack import DocumentSpans
from .permute import WEIGHTS, permutation


def weigh(documents: DocumentSpans, weights: Sequence[float], seed: int) -> DocumentSpans:
    """Training documents, those of data set i `weights[i]` times: 2.5 is each twice and a random half once more.

    Documents are counted, not tokens; which ones are chosen is a function of `seed`. Raises ConfigError when a data set
    is left without any.
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
