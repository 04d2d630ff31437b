"""Random orders that are functions of their key: no state to save, any epoch's order at once."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

SHUFFLE: Final = 0
VALIDATION: Final = 1
EVALUATION: Final = 2
WEIGHTS: Final = 3


def permutation(n: int, seed: int, index: int = 0, purpose: int = SHUFFLE) -> npt.NDArray[np.int64]:
    """A permutation of range(n), a function of the arguments alone.

    Sorts the raw output of the counter-based Philox 4x64 under the key (seed, index): numpy promises that stream to
    stay the same from version to version, and does not promise it of `Generator.permutation`.
    """
    key = np.array([seed % (1 << 64), index], np.uint64)
    draws = np.random.Philox(key=key, counter=np.array([0, 0, 0, purpose], np.uint64)).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)
