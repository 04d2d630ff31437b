"""The data of a step: micro-batches of token arrays, and those of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ConfigError

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


def next_token_batch(tokens: npt.NDArray[Any]) -> StepBatch:
    """Return the batch of an optimizer step from ids of tokens, int [micro-steps, rows, length] or [rows, length].

    Every row is a document. Each of its tokens but the first is a label. Raises ConfigError for another array.
    """
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (2, 3) or not tokens.size or tokens.shape[-1] < 2:
        raise ConfigError(
            f"a batch is {tokens.dtype} {list(tokens.shape)}. Give ids of tokens, integers, as [micro-steps, rows, "
            "length] or [rows, length], of 2 or more tokens in a row."
        )
    every = tokens.astype(np.int32).reshape(-1, *tokens.shape[-2:])
    _, rows, length = every.shape
    targets = np.full_like(every, NO_LABEL)
    targets[..., :-1] = every[..., 1:]
    positions = np.tile(np.arange(length, dtype=np.int32), rows)
    documents = np.arange(rows + 1, dtype=np.int32) * np.int32(length)
    labels = rows * (length - 1)
    micro = [
        MicroBatch(ids.reshape(-1), following.reshape(-1), positions, documents, rows * length, labels)
        for ids, following in zip(every, targets, strict=True)
    ]
    return StepBatch(micro=micro, tokens=every.size, valid_tokens=labels * len(micro), epoch=0.0)
