"""Permutations as functions of a key: no state to save, and the order of any epoch is available directly."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

SHUFFLE: Final = 0
VALIDATION: Final = 1
EVALUATION: Final = 2
WEIGHTS: Final = 3


def permutation(n: int, seed: int, index: int = 0, purpose: int = SHUFFLE) -> npt.NDArray[np.int64]:
    """Return a permutation of range(n) that depends on the arguments alone.

    Sorts the raw output of the counter-based generator Philox 4x64 with the key (seed, index). numpy guarantees that
    this stream is the same in all versions, but not that of `Generator.permutation`.
    """
    key = np.array([seed % (1 << 64), index], np.uint64)
    draws = np.random.Philox(key=key, counter=np.array([0, 0, 0, purpose], np.uint64)).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)
