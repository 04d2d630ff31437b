"""The extent of a comparison: rows, layers, weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extent:
    """The part of a run to compare.

    rows           rows of the batch
    length         tokens per row; None: the run's `sequence_len`, at most 512
    layers         compare only the model's first `layers`; None: all of them
    random_tokens  use random tokens even if the run has data
    """

    rows: int = 2
    length: int | None = None
    layers: int | None = None
    random_tokens: bool = False
