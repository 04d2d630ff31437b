from __future__ import annotations

import math

import numpy as np
import pytest

from surogate.data import checks
from surogate.data.cache import TokenDataset
from surogate.data.pack import DocumentSpans, PackedRows, pack
from surogate_core.errors import ConfigError


def packed(documents: list[list[int]], trained: bool = True) -> PackedRows:
    tokens = np.array([token for document in documents for token in document], np.uint16)
    dataset = TokenDataset(
        tokens=tokens,
        mask=np.packbits(np.full(len(tokens), trained), bitorder="little"),
        offsets=np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64),
        n_bytes=len(tokens),
        max_token=int(tokens.max()),
        n_trained=len(tokens) if trained else 0,
    )
    return pack(DocumentSpans.of([dataset]), 16)


def test_good_data_passes() -> None:
    checks.check_rows(packed([[1, 2, 3], [4, 5]]), 6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (packed([[1], [2]]), "datasets: no document has two tokens"),
        (packed([[1, 2, 6]]), "datasets: token 6 is outside the model's vocab_size of 6"),
        (packed([[1, 2, 3]], trained=False), "datasets: no token is trained"),
    ],
)
def test_data_that_cannot_train_is_refused_before_step_one(rows: PackedRows, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checks.check_rows(rows, 6)


def test_unigram_loss_is_the_loss_of_the_smoothed_counts() -> None:
    train = checks.label_counts(packed([[0, 1, 1, 2], [0, 1]]), 4)
    valid = checks.label_counts(packed([[3, 1, 3]]), 4)
    assert train.tolist() == [0, 3, 1, 0] and valid.tolist() == [0, 1, 0, 1]
    assert checks.unigram_loss(train, valid, 4) == pytest.approx(-(math.log(4 / 8) + math.log(1 / 8)) / 2)


def test_large_sets_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packed([[1, 2, 3, 4]] * 100_000)
    everything = checks.label_counts(rows, 5)
    assert everything.sum() == 300_000
    monkeypatch.setattr(checks, "COUNTED_LABELS", 200_000)
    assert 50_000 < checks.label_counts(rows, 5).sum() < 300_000


def test_bits_per_byte_counts_the_bytes_of_the_labels() -> None:
    labels = np.array([5, 2, 3])
    assert checks.label_bytes(labels, np.array([0, 4, 1, 9], np.int32)) == 2 * 4 + 3
    assert checks.bits_per_byte(math.log(2), 10, 20) == pytest.approx(0.5)


def test_figures_without_labels_are_refused() -> None:
    none = np.zeros(3, np.int64)
    with pytest.raises(ConfigError, match="no token is a label"):
        checks.unigram_loss(none, none, 3)
    with pytest.raises(ConfigError, match="0 bytes"):
        checks.bits_per_byte(1.0, 1, 0)
