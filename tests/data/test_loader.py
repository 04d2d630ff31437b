from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surogate.data.cache import TokenDataset
from surogate.data.loader import Loader, Prefetch, eval_batches
from surogate.data.pack import DocumentSpans, PackedRows, pack
from surogate.data.permute import EVALUATION, permutation
from surogate_core.batch import NO_LABEL, MicroBatch
from surogate_core.errors import ConfigError

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=30).filter(lambda lengths: max(lengths) > 1)
PAD = 7


def dataset_of(lengths: list[int], trained_share: float = 1.0) -> TokenDataset:
    """Every token is 1000 + its position, so that a batch shows where each token came from."""
    n = sum(lengths)
    mask = np.random.default_rng(0).random(n) < trained_share
    return TokenDataset(
        tokens=np.arange(1000, 1000 + n, dtype=np.uint16),
        mask=np.packbits(mask, bitorder="little"),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        n_bytes=n,
        max_token=999 + n,
        n_trained=int(mask.sum()),
    )


def packed(lengths: list[int], sequence_len: int = 16, trained_share: float = 1.0) -> PackedRows:
    return pack(DocumentSpans.of([dataset_of(lengths, trained_share)]), sequence_len)


def contents(batch: MicroBatch) -> list[int]:
    tokens: list[int] = batch.tokens[batch.tokens != PAD].tolist()
    return tokens


@given(lengths_lists, st.integers(2, 33), st.integers(1, 4), st.floats(0, 1))
def test_batches_keep_the_contract(lengths: list[int], sequence_len: int, batch_size: int, share: float) -> None:
    dataset = dataset_of(lengths, share)
    rows = pack(DocumentSpans.of([dataset]), sequence_len)
    total = batch_size * sequence_len
    for (batch,) in eval_batches(rows, batch_size, pad_id=PAD):
        assert {a.dtype for a in (batch.tokens, batch.targets, batch.positions, batch.cu_seqlens)} == {
            np.dtype("int32")
        }
        assert len(batch.tokens) == len(batch.targets) == len(batch.positions) == total
        assert len(batch.cu_seqlens) == batch_size * rows.max_documents + 1
        # documents tile [0, T], unused entries repeat T
        bounds = batch.cu_seqlens.tolist()
        used = bounds.index(total)
        assert bounds[0] == 0 and set(bounds[used:]) == {total}
        assert all(a < b for a, b in pairwise(bounds[: used + 1]))
        valid = 0
        for a, b in pairwise(bounds[: used + 1]):
            assert a // sequence_len == (b - 1) // sequence_len, "a document crosses a row"
            assert batch.positions[a:b].tolist() == list(range(b - a))
            tokens, targets = batch.tokens[a:b], batch.targets[a:b]
            assert targets[-1] == NO_LABEL
            if tokens[0] == PAD:
                assert set(tokens.tolist()) == {PAD} and set(targets.tolist()) == {NO_LABEL}
                continue
            assert (np.diff(tokens) == 1).all(), "a document is consecutive tokens"
            trained = dataset.trained_at(tokens[1:].astype(np.int64) - 1000)
            assert targets[:-1].tolist() == np.where(trained, tokens[1:], NO_LABEL).tolist()
            valid += int(trained.sum())
        assert batch.n_valid == valid == int((batch.targets != NO_LABEL).sum())
        assert batch.n_tokens == int((batch.tokens != PAD).sum())


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_permutation_is_valid_and_depends_on_its_key_only(n: int, seed: int, epoch: int) -> None:
    order = permutation(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert (permutation(n, seed, epoch) == order).all()


def test_permutations_of_other_keys_differ_and_never_change() -> None:
    orders = [permutation(50, 1), permutation(50, 2), permutation(50, 1, 1), permutation(50, 1, 0, EVALUATION)]
    assert len({tuple(order) for order in orders}) == 4
    # a change here silently changes every run's data order
    assert permutation(8, 1234, 1).tolist() == [0, 5, 6, 4, 2, 1, 7, 3]


@given(lengths_lists, st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_an_epoch_covers_every_row_once(lengths: list[int], batch_size: int, accumulation: int, epoch: int) -> None:
    rows = packed(lengths)
    loader = Loader(rows, batch_size, accumulation, seed=3, pad_id=PAD)
    assert loader.steps_per_epoch == -(-rows.n_rows // (batch_size * accumulation))
    first = epoch * loader.steps_per_epoch
    steps = [loader.step(first + i) for i in range(loader.steps_per_epoch)]
    assert all(len(step.micro) == accumulation for step in steps)
    tokens = sorted(token for step in steps for batch in step.micro for token in contents(batch))
    everything = [t for a, b in zip(rows.start, rows.stop, strict=True) for t in range(1000 + a, 1000 + b)]
    assert tokens == sorted(everything)
    assert sum(step.tokens for step in steps) == rows.n_tokens
    assert steps[-1].epoch == epoch + 1


def test_steps_are_random_access_and_the_same_for_the_same_seed() -> None:
    rows = packed([13, 40, 7, 9, 22, 31, 5] * 5)
    one, two, other = (Loader(rows, 2, 2, seed) for seed in (1, 1, 2))
    order = list(range(3 * one.steps_per_epoch))
    forwards = [one.step(i).micro[0].tokens.tolist() for i in order]
    backwards = [two.step(i).micro[0].tokens.tolist() for i in reversed(order)]
    assert forwards == backwards[::-1]
    assert forwards != [other.step(i).micro[0].tokens.tolist() for i in order]
    epoch = one.steps_per_epoch
    assert forwards[:epoch] != forwards[epoch : 2 * epoch]


def test_labels_of_a_step_do_not_depend_on_its_division_into_micro_batches() -> None:
    rows = packed([13, 40, 7, 9, 22, 31, 5] * 5, trained_share=0.5)
    for index in range(6):
        steps = [Loader(rows, *shape, seed=5).step(index) for shape in ((4, 1), (2, 2), (1, 4))]
        assert len({(step.tokens, step.valid_tokens) for step in steps}) == 1
        assert len({tuple(np.concatenate([b.targets for b in step.micro])) for step in steps}) == 1


def test_evaluation_reads_every_row_once_whatever_the_training_seed() -> None:
    rows = packed([13, 40, 7, 9, 22, 31, 5] * 5)
    first = [contents(batch) for (batch,) in eval_batches(rows, 3, pad_id=PAD)]
    Loader(rows, 2, 2, seed=9).step(4)
    assert [contents(batch) for (batch,) in eval_batches(rows, 3, pad_id=PAD)] == first
    assert len([token for batch in first for token in batch]) == rows.n_tokens
    assert [contents(batch) for (batch,) in eval_batches(rows, 3, limit=6, pad_id=PAD)] == first[:2]


def test_loader_refuses_empty_data_and_sizes_below_one() -> None:
    with pytest.raises(ConfigError, match="per_device_train_batch_size"):
        Loader(packed([9]), 0, 1, 1)
    with pytest.raises(ConfigError, match="no row to train on"):
        Loader(packed([1, 1]), 1, 1, 1)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("surogate-prefetch")]


def test_prefetch_yields_every_item_in_order_and_ends() -> None:
    with Prefetch(lambda i: i * i, 3, 40) as items:
        assert list(items) == [i * i for i in range(3, 40)]
    assert prefetch_threads() == []


def test_prefetch_left_early_ends_its_thread_and_computes_no_more_items() -> None:
    made: list[int] = []

    def make(index: int) -> int:
        made.append(index)
        return index

    with Prefetch(make, 0, 1000, ahead=2) as items:
        assert next(items) == 0
        time.sleep(0.1)
    assert prefetch_threads() == []
    assert len(made) <= 4  # one taken, two waiting, one in hand


def test_prefetch_raises_an_error_at_the_item_that_failed() -> None:
    def make(index: int) -> int:
        if index == 2:
            raise ConfigError("broken at 2")
        return index

    items = Prefetch(make, 0, 5)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ConfigError, match="broken at 2"):
        next(items)
    assert prefetch_threads() == []
    with pytest.raises(StopIteration):
        next(items)


def test_rows_of_padding_fill_the_last_step() -> None:
    rows = packed([16] * 5)
    step = Loader(rows, 2, 2, 1, pad_id=PAD).step(1)
    assert (step.tokens, step.valid_tokens, step.epoch) == (16, 15, 1.0)
    assert step.micro[1].n_tokens == 0 and set(step.micro[1].tokens.tolist()) == {PAD}
    assert step.micro[1].cu_seqlens.tolist()[:4] == [0, 16, 32, 32]


def test_masked_documents_have_no_label() -> None:
    rows = packed([16] * 3)
    silent = replace(rows.corpus.datasets[0], mask=np.zeros(6, np.uint8))
    (batch,) = next(eval_batches(replace(rows, corpus=replace(rows.corpus, datasets=(silent,))), 3))
    assert batch.n_valid == 0 and batch.n_tokens == 48
