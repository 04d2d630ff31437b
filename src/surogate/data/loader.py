"""The batches of an optimizer step, as a function of its number: the seed is the only state of the data order.

Micro-batches follow the contract of `api.BatchInputs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from surogate_core.api import Document
from surogate_core.batch import NO_LABEL, Int32s, MicroBatch, StepBatch
from surogate_core.errors import ConfigError

from .cache import Bools, Int64s
from .pack import PackedRows, ranges
from .permute import EVALUATION, SHUFFLE, permutation


class Loader:
    """Training batches. Each epoch is shuffled by (seed, epoch); `step(i)` may be called in any order.

    micro_batches: micro-batches per optimizer step, over all `world_size` ranks; each has `batch_size` rows. The rows
    of a step depend on the product of both alone. Rank r takes the micro-batches r, r + world_size, ..., of which
    `step` returns those of `ranks`. steps_per_epoch = ceil(rows / (batch_size * micro_batches)). The last step of an
    epoch is filled with rows of padding. These have no weight: the loss is the mean over the labels of the step.
    """

    def __init__(
        self,
        rows: PackedRows,
        batch_size: int,
        micro_batches: int,
        seed: int,
        pad_id: int = 0,
        *,
        ranks: range = range(1),
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or micro_batches < 1:
            raise ConfigError(
                f"per_device_train_batch_size ({batch_size}) and the micro-batches of a step ({micro_batches}: "
                "gradient_accumulation_steps x GPUs) must be 1 or more."
            )
        if rows.n_rows == 0:
            raise ConfigError(
                "datasets: no row to train on: every document is shorter than two tokens. Use other data."
            )
        self.rows = rows
        self.batch_size = batch_size
        self.micro_batches = micro_batches
        self.seed = seed
        self.pad_id = pad_id
        self._ranks, self._world_size = ranks, world_size
        self.steps_per_epoch = -(-rows.n_rows // (batch_size * micro_batches))
        self._order: tuple[int, Int64s] = (-1, np.zeros(0, np.int64))

    @property
    def tokens_per_step(self) -> int:
        """Positions of a step, including padding."""
        return self.batch_size * self.micro_batches * self.rows.sequence_len

    def step(self, index: int) -> StepBatch:
        """Return the data of optimizer step `index`, counted from 0 over the whole run."""
        epoch, within = divmod(index, self.steps_per_epoch)
        per_step = self.batch_size * self.micro_batches
        chosen = self._epoch_order(epoch)[within * per_step : (within + 1) * per_step]
        micro, others = [], []
        for number, at in enumerate(range(0, per_step, self.batch_size)):
            some = chosen[at : at + self.batch_size]
            if number % self._world_size in self._ranks:
                micro.append(micro_batch(self.rows, some, self.batch_size, self.pad_id))
            else:
                others.append(some)
        tokens, labels, groups = counts(self.rows, np.concatenate(others)) if others else (0, 0, 0)
        return StepBatch(
            micro=micro,
            tokens=tokens + sum(batch.n_tokens for batch in micro),
            valid_tokens=labels + sum(batch.n_valid for batch in micro),
            epoch=(index + 1) / self.steps_per_epoch,
            groups=groups + sum(batch.n_groups for batch in micro),
        )

    def _epoch_order(self, epoch: int) -> Int64s:
        held, order = self._order
        if held != epoch:
            order = permutation(self.rows.n_rows, self.seed, epoch, SHUFFLE)
            self._order = (epoch, order)
        return order


def eval_batches(
    rows: PackedRows,
    batch_size: int,
    limit: int | None = None,
    *,
    pad_id: int = 0,
    seed: int = 0,
    ranks: range = range(1),
    world_size: int = 1,
) -> Iterator[tuple[MicroBatch, ...]]:
    """Yield batches for the ranks of this process that, over all ranks, cover every row once, at most `limit` rows.

    Their order depends on `seed` alone. It is random because packing sorts by length: the first rows are not a sample
    of the set. Batches beyond the last row are padding, so that every rank gets as many.
    """
    order = permutation(rows.n_rows, seed, purpose=EVALUATION)[:limit]
    for at in range(0, len(order), batch_size * world_size):
        firsts = (at + rank * batch_size for rank in ranks)
        yield tuple(micro_batch(rows, order[first : first + batch_size], batch_size, pad_id) for first in firsts)


def counts(rows: PackedRows, chosen: Int64s) -> tuple[int, int, int]:
    """Return (positions that are not padding, labels, groups) of rows, as `micro_batch` has them."""
    _, start, stop = rows.documents(chosen)
    length = stop - start
    _, trained = rows.corpus.read(ranges(start, length))
    at = np.cumsum(length) - length
    trained[at] = False  # the first token of a document is no label
    groups = len(_groups(rows, at, length, trained)) if rows.asked.group else 0
    return int(length.sum()), int(np.count_nonzero(trained)), groups


def _groups(rows: PackedRows, at: Int64s, length: Int64s, labelled: Bools) -> Int64s:
    """Return [n, group]: the documents of each group. Documents that are groups of their own have a label.

    at: int64, first position of each document in `labelled`.
    """
    group = rows.corpus.group
    if group > 1:
        return np.arange(len(at)).reshape(-1, group)
    before = np.concatenate([[0], np.cumsum(labelled)])
    return np.flatnonzero(before[at + length] - before[at])[:, None]


def micro_batch(rows: PackedRows, chosen: Int64s, batch_size: int, pad_id: int) -> MicroBatch:
    """Return the rows `chosen` as a batch of `batch_size` rows; missing rows are padding."""
    seq_len, total = rows.sequence_len, batch_size * rows.sequence_len
    row, start, stop = rows.documents(chosen)
    length = stop - start
    before = np.cumsum(length) - length
    row_length = np.bincount(row, weights=length, minlength=batch_size).astype(np.int64)
    at = row * seq_len + before - (np.cumsum(row_length) - row_length)[row]  # start of each piece in the batch

    slots = ranges(at, length)
    read = ranges(start, length)
    read_tokens, trained = rows.corpus.read(read)
    within = ranges(np.zeros_like(length), length)
    labelled = np.zeros(len(slots), np.bool_)
    labelled[:-1] = trained[1:] & (within[1:] > 0)  # the next token is of the same document, and trained

    tokens = np.full(total, pad_id, np.int32)
    targets = np.full(total, NO_LABEL, np.int32)
    tokens[slots] = read_tokens
    targets[slots[labelled]] = read_tokens[1:][labelled[:-1]]

    positions, cu_seqlens = _offsets(at, row_length, rows)
    batch = MicroBatch(tokens, targets, positions, cu_seqlens, len(slots), int(np.count_nonzero(labelled)))
    return _with_asked(batch, rows, (at, start, length), slots[labelled], read[1:][labelled[:-1]])


def _offsets(at: Int64s, row_length: Int64s, rows: PackedRows) -> tuple[Int32s, Int32s]:
    """Return positions and cu_seqlens of documents that begin at `at`, in rows that are filled up to `row_length`."""
    total = len(row_length) * rows.sequence_len
    padding = np.arange(len(row_length)) * rows.sequence_len + row_length
    starts = np.sort(np.concatenate([at, padding[row_length < rows.sequence_len]]))
    cu_seqlens = np.full(len(row_length) * rows.max_documents + 1, total, np.int32)
    cu_seqlens[: len(starts)] = starts
    positions = np.arange(total) - np.repeat(starts, np.diff(np.append(starts, total)))
    return positions.astype(np.int32), cu_seqlens


def _before(
    batch: MicroBatch, rows: PackedRows, documents: Callable[[Sequence[Document]], Sequence[Document]]
) -> MicroBatch:
    """Return the batch that the prepass reads: `documents` (see `Prepass`) of those of each row."""
    total, seq_len = len(batch.tokens), rows.sequence_len
    tokens, targets = batch.tokens.copy(), np.full(total, NO_LABEL, np.int32)
    spans, row_length = [], np.zeros(total // seq_len, np.int64)
    groups = np.asarray(batch.asked["groups"])[: batch.n_groups, 0].tolist()
    for row in range(len(row_length)):
        inside = [slice(a, b) for a, b in groups if a // seq_len == row]
        for ids, labels in documents([(batch.tokens[span], batch.targets[span]) for span in inside]):
            at = row * seq_len + int(row_length[row])
            spans.append((at, at + len(ids)))
            tokens[slice(*spans[-1])], targets[slice(*spans[-1])] = ids, labels
            row_length[row] += len(ids)
    bounds = np.array(spans, np.int64).reshape(-1, 2)
    positions, cu_seqlens = _offsets(bounds[:, 0], row_length, rows)
    asked = {name: np.zeros_like(value) for name, value in batch.asked.items()}
    np.asarray(asked["groups"])[: len(spans), 0] = bounds
    labels = int(np.count_nonzero(targets != NO_LABEL))
    return MicroBatch(tokens, targets, positions, cu_seqlens, int(row_length.sum()), labels, len(spans), asked)


def _with_asked(
    batch: MicroBatch, rows: PackedRows, documents: Sequence[Int64s], labelled: Int64s, labels: Int64s
) -> MicroBatch:
    """Return the batch with what the loss asks for.

    documents: position in the batch and in the corpus, and length, of each. labelled, labels: positions with a label in
    the batch, and of these labels in the corpus.
    """
    asked, total = rows.asked, len(batch.tokens)
    if not asked.group and not asked.columns:
        return batch
    at, start, length = documents
    groups = _groups(rows, at, length, batch.targets != NO_LABEL)
    most = total // rows.sequence_len * (rows.max_documents - 1) // rows.corpus.group
    arrays: dict[str, npt.NDArray[Any] | float] = {}
    if asked.group:
        spans = arrays["groups"] = np.zeros((most, asked.group, 2), np.int32)
        spans[: len(groups)] = np.stack([at, at + length], -1)[groups]
    for column in asked.columns:
        if column.per == "token":
            numbers = rows.corpus.column(column.name, labels, rows.corpus.bases)
            whole = np.zeros((total, *numbers.shape[1:]), numbers.dtype)
            whole[labelled] = numbers
        else:
            whole = np.zeros((most, asked.group), np.float32)
            index = np.searchsorted(rows.corpus.bounds, start, side="right") - 1
            whole[: len(groups)] = rows.corpus.column(column.name, index[groups], rows.corpus.document_bases)
        arrays[f"column.{column.name}"] = whole
    batch = replace(batch, n_groups=len(groups) if asked.group else 0, asked=arrays)
    if asked.prepass is None:
        return batch
    batch = batch.given({f"mean.{name}": 0.0 for name in asked.prepass.means})
    return replace(batch, before=_before(batch, rows, asked.prepass.documents))


Item = TypeVar("Item")


class Prefetch(Iterator[Item]):
    """Iterates over make(start) ... make(stop - 1), computed by a thread up to `ahead` + 1 items in advance.

    Also a context manager: leaving the context ends the thread, whether or not all items were read, once it is done
    with the item in hand. An error of `make` is raised by `next` at that item.
    """

    def __init__(self, make: Callable[[int], Item], start: int, stop: int, ahead: int = 2) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="surogate-prefetch")
        self._calls = (self._thread.submit(make, index) for index in range(start, stop))
        self._items = deque(islice(self._calls, ahead + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __next__(self) -> Item:
        if not self._items:
            raise StopIteration
        item = self._items.popleft()
        self._items.extend(islice(self._calls, 1))
        try:
            return item.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._items.clear()
        self._thread.shutdown(cancel_futures=True)
