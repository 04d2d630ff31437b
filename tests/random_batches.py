"""Micro-batches of random documents, for programs that are run without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from surogate_core.batch import MicroBatch


def random_batch(
    rng: np.random.Generator, config: Mapping[str, Any], rows: int, seq_len: int, documents: int
) -> MicroBatch:
    """Return a batch of at most `documents` documents; of four, one is empty (padding alone) and one has no labels."""
    kind, tokens_in_all = rng.integers(4), rows * seq_len
    starts = {row * seq_len for row in range(rows)}
    if kind:
        starts |= set(rng.integers(1, tokens_in_all, rng.integers(documents - rows)).tolist())
    offsets = np.full(documents + 1, tokens_in_all, np.int32)
    offsets[: len(starts)] = sorted(starts)
    positions = np.concatenate([np.arange(n) for n in np.diff([*sorted(starts), tokens_in_all])]).astype(np.int32)
    tokens = rng.integers(0, config["vocab_size"], tokens_in_all).astype(np.int32) * (kind > 0)
    labelled = (rng.random(tokens_in_all) < rng.random()) & (kind > 1)
    targets = np.where(labelled, np.roll(tokens, -1), -100).astype(np.int32)
    return MicroBatch(
        tokens.astype(np.int32), targets, positions, offsets, tokens_in_all if kind else 0, int(labelled.sum())
    )
