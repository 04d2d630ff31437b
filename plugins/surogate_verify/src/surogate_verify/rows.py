"""The rows that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from surogate.data.asked import Asked
from surogate.data.cache import Int64s, TokenDataset
from surogate.data.corpora import Corpora
from surogate.data.loader import micro_batch
from surogate.data.pack import Corpus, PackedRows
from surogate.data.permute import SHUFFLE, permutation
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.batch import NO_LABEL, MicroBatch
from surogate_core.errors import ConfigError

_TRIED_ROWS = 256
"""Rows of the data that are searched for labels."""

_DOCUMENTS_A_ROW = 4


@dataclass(frozen=True)
class ComparedRows:
    """A micro-batch, and a description of where its tokens come from."""

    batch: MicroBatch
    description: str

    @property
    def groups(self) -> Sequence[Sequence[Sequence[int]]]:
        """(start, stop) of the documents of each group, else of each with a label. Others change nothing."""
        if self.batch.n_groups:
            return np.asarray(self.batch.asked["groups"])[: self.batch.n_groups].tolist()
        bounds = pairwise(dict.fromkeys(self.batch.cu_seqlens.tolist()))
        return [[(a, b)] for a, b in bounds if bool((self.batch.targets[a:b] != NO_LABEL).any())]


def from_data(data: Corpora, inputs: PlanInputs, seed: int) -> ComparedRows:
    """Return random rows of the training data with labels, cut to the compared length, which those of groups have."""
    n_rows, length, padding = inputs.batch_size, inputs.seq_len, data.tokenizer.padding_id
    tried = permutation(data.train.n_rows, seed, purpose=SHUFFLE)[:_TRIED_ROWS]
    rows, tried = (
        (data.train, tried) if inputs.loss.group_size else (_cut(data.train, tried, inputs), np.arange(len(tried)))
    )
    labelled = [row for row in tried.tolist() if micro_batch(rows, np.array([row]), 1, padding).n_valid]
    if not labelled:
        raise ConfigError(
            f"datasets: none of {len(tried)} rows has a label in its first {length} tokens. Raise --length, "
            "or use --random-tokens."
        )
    chosen = np.resize(labelled[:n_rows], n_rows)  # few rows with labels are repeated
    batch = micro_batch(rows, chosen, n_rows, padding)
    return ComparedRows(batch, f"{n_rows} x {length} from the run's data, {batch.n_valid:,} labels")


def random_rows(inputs: PlanInputs, seed: int) -> ComparedRows:
    """Return random tokens in documents of random lengths, all of them labelled."""
    n_rows, length, vocab_size = inputs.batch_size, inputs.seq_len, inputs.dims.vocab_size
    rng, group = np.random.default_rng(seed), max(1, inputs.loss.group_size)
    documents = max(1, min(_DOCUMENTS_A_ROW, _documents_a_row(inputs) - 1, length // 8) // group) * group
    bounds: list[int] = []
    tokens = []
    for row in range(n_rows):
        inner = sorted(rng.choice(np.arange(2, length - 1), documents - 1, replace=False).tolist())
        bounds += [row * length + start for start in (0, *inner)]
        tokens.append(rng.integers(0, vocab_size, length, dtype=np.int32))
    offsets, total = np.array([*bounds, n_rows * length]), n_rows * length
    trained = np.full(-(-total // 8), 0xFF, np.uint8)
    corpus = Corpus((TokenDataset(np.concatenate(tokens), trained, offsets, 0, vocab_size - 1, total, group=group),))
    of_rows, asked = np.arange(n_rows + 1) * documents // group, Asked(group=inputs.loss.group_size)
    pieces = offsets[:-1:group], offsets[group::group]
    rows = PackedRows(corpus, length, *pieces, of_rows, _documents_a_row(inputs), asked)
    batch = micro_batch(rows, np.arange(n_rows), n_rows, 0)
    return ComparedRows(batch, f"{n_rows} x {length} random tokens in documents, {batch.n_valid:,} labels")


def _documents_a_row(inputs: PlanInputs) -> int:
    """Return the most documents per row that the programs allow. Padding counts as one."""
    return inputs.max_documents // inputs.batch_size


def _cut(rows: PackedRows, chosen: Int64s, inputs: PlanInputs) -> PackedRows:
    """Return the first positions of rows, as many as are compared, and of these the documents that programs allow."""
    spans: list[tuple[Int64s, Int64s]] = []
    for row in chosen:
        _, start, stop = (found[: _documents_a_row(inputs) - 1] for found in rows.documents(np.array([row])))
        room = inputs.seq_len - (np.cumsum(stop - start) - (stop - start))
        spans.append((start[room > 0], np.minimum(stop, start + room)[room > 0]))
    starts, stops = (np.concatenate(found) for found in zip(*spans, strict=True))
    offsets = np.cumsum([0, *(len(start) for start, _ in spans)])
    corpus = Corpus(tuple(replace(dataset, group=1) for dataset in rows.corpus.datasets))  # groups may be cut
    return PackedRows(corpus, inputs.seq_len, starts, stops, offsets, _documents_a_row(inputs))
