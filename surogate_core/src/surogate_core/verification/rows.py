"""The rows that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..assembly.inputs import PlanInputs
from ..data.corpora import Corpora
from ..data.loader import NO_LABEL, MicroBatch, micro_batch
from ..data.permute import SHUFFLE, permutation
from ..errors import ConfigError

_TRIED_ROWS = 256
"""Rows of the data that are searched for labels."""

_DOCUMENTS_A_ROW = 4


@dataclass(frozen=True)
class ComparedRows:
    """A micro-batch, and a description of where its tokens come from."""

    batch: MicroBatch
    description: str

    @property
    def documents(self) -> list[tuple[int, int]]:
        """(start, stop) of each document with a label. The others, and padding, do not affect loss or gradients."""
        bounds = pairwise(dict.fromkeys(self.batch.cu_seqlens.tolist()))
        return [(a, b) for a, b in bounds if bool((self.batch.targets[a:b] != NO_LABEL).any())]


def from_data(data: Corpora, inputs: PlanInputs, seed: int) -> ComparedRows:
    """Return random rows of the training data, cut to the compared length. Rows without a label are skipped."""
    n_rows, length = inputs.batch_size, inputs.seq_len
    found: list[MicroBatch] = []
    order = permutation(data.train.n_rows, seed, purpose=SHUFFLE)[:_TRIED_ROWS]
    for row in order:
        whole = micro_batch(data.train, np.array([row]), 1, data.tokenizer.padding_id)
        cut = _cut(whole, length, _documents_a_row(inputs), data.tokenizer.padding_id)
        found += [cut] * bool(cut.n_valid)
        if len(found) == n_rows:
            break
    if not found:
        raise ConfigError(
            f"datasets: none of {len(order)} rows has a label in its first {length} tokens. Raise --length, "
            "or use --random-tokens."
        )
    distinct = len(found)
    while len(found) < n_rows:  # few rows with labels: repeat them
        found.append(found[len(found) % distinct])
    batch = _joined(found, length, inputs)
    return ComparedRows(batch, f"{n_rows} x {length} from the run's data, {batch.n_valid:,} labels")


def random_rows(inputs: PlanInputs, seed: int) -> ComparedRows:
    """Return random tokens in documents of random lengths, all of them labelled."""
    n_rows, length = inputs.batch_size, inputs.seq_len
    rng = np.random.default_rng(seed)
    documents = min(_DOCUMENTS_A_ROW, _documents_a_row(inputs) - 1, max(1, length // 8))
    rows = []
    for _ in range(n_rows):
        inner = sorted(rng.choice(np.arange(2, length - 1), documents - 1, replace=False).tolist())
        starts = np.array([0, *inner], np.int32)
        tokens = rng.integers(0, inputs.dims.vocab_size, length, dtype=np.int32)
        targets = np.append(tokens[1:], NO_LABEL).astype(np.int32)
        targets[starts[1:] - 1] = NO_LABEL
        positions = np.arange(length) - np.repeat(starts, np.diff(np.append(starts, length)))
        labels = int((targets != NO_LABEL).sum())
        rows.append(MicroBatch(tokens, targets, positions.astype(np.int32), starts, length, labels))
    batch = _joined(rows, length, inputs)
    return ComparedRows(batch, f"{n_rows} x {length} random tokens in documents, {batch.n_valid:,} labels")


def _documents_a_row(inputs: PlanInputs) -> int:
    """Return the most documents per row that the programs allow. Padding counts as one."""
    return inputs.max_documents // inputs.batch_size


def _cut(row: MicroBatch, length: int, most: int, pad_id: int) -> MicroBatch:
    """Return the first `length` positions of a batch of one row. Past `most` - 1 documents it becomes padding."""
    starts = row.cu_seqlens[: row.n_documents]
    starts = starts[starts < length]
    tokens, targets, positions = (a[:length].copy() for a in (row.tokens, row.targets, row.positions))
    if len(starts) > most:
        starts = starts[:most]
        end = starts[-1]
        tokens[end:], targets[end:], positions[end:] = pad_id, NO_LABEL, np.arange(length - end)
    return MicroBatch(tokens, targets, positions, starts, length, int((targets != NO_LABEL).sum()))


def _joined(rows: list[MicroBatch], length: int, inputs: PlanInputs) -> MicroBatch:
    """Join rows into one batch. Their `cu_seqlens` hold only the starts of their documents."""
    total = length * len(rows)
    starts = np.concatenate([row.cu_seqlens + n * length for n, row in enumerate(rows)])
    cu_seqlens = np.full(inputs.max_documents + 1, total, np.int32)
    cu_seqlens[: len(starts)] = starts
    return MicroBatch(
        np.concatenate([row.tokens for row in rows]),
        np.concatenate([row.targets for row in rows]),
        np.concatenate([row.positions for row in rows]),
        cu_seqlens,
        total,
        sum(row.n_valid for row in rows),
    )
