"""The data of a step: micro-batches of token arrays, and those of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

NO_LABEL = -100

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of `sequence_len`, flattened to T = rows * sequence_len positions; all int32.

    tokens, targets, positions: [T]. cu_seqlens: [rows * max_documents + 1]; documents tile [0, T], the rest of a row
    is one document of padding, and unused entries repeat T. n_tokens: positions that are not padding. n_valid: labels.
    n_groups: groups of documents. asked: further inputs, by name, if the run's loss asks for any. before: what its
    prepass reads.
    """

    tokens: Int32s
    targets: Int32s
    positions: Int32s
    cu_seqlens: Int32s
    n_tokens: int
    n_valid: int
    n_groups: int = 0
    asked: Mapping[str, npt.NDArray[Any] | float] = field(default_factory=dict)
    before: MicroBatch | None = None

    def given(self, asked: Mapping[str, npt.NDArray[Any] | float]) -> MicroBatch:
        """Return the batch with other contents of some inputs."""
        return replace(self, asked={**self.asked, **asked})

    @property
    def n_documents(self) -> int:
        """Number of documents; the padding of a row counts as one."""
        return int(np.searchsorted(self.cu_seqlens, len(self.tokens)))


@dataclass(frozen=True)
class StepBatch:
    """The data of an optimizer step.

    micro: the micro-batches of the ranks of this process; those that they take at the same time are adjacent. tokens,
    valid_tokens, groups: positions that are not padding, labels and groups, of all ranks. epoch: epochs completed after
    the step. reports_numerics: the first micro-step also writes the numerics report.
    """

    micro: list[MicroBatch]
    tokens: int
    valid_tokens: int
    epoch: float
    groups: int = 0
    reports_numerics: bool = False
