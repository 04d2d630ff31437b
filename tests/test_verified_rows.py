"""The rows that `surogate verify` compares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from surogate.data.cache import TokenDataset
from surogate.data.pack import DocumentSpans, pack
from surogate_verify.rows import from_data


def test_few_rows_with_labels_in_the_compared_length_are_repeated() -> None:
    """Of six documents one has a label in its first eight tokens."""
    trained = np.zeros((6, 16), np.bool_)
    trained[:, 12:], trained[3, 4:] = True, True
    tokens = np.arange(96, dtype=np.uint16)
    mask, offsets = np.packbits(trained.ravel(), bitorder="little"), np.arange(0, 97, 16)
    documents = DocumentSpans.of([TokenDataset(tokens, mask, offsets, 96, 95, int(trained.sum()))])
    data: Any = SimpleNamespace(train=pack(documents, 16), tokenizer=SimpleNamespace(padding_id=0))
    inputs: Any = SimpleNamespace(batch_size=3, seq_len=8, max_documents=9, loss=SimpleNamespace(group_size=0))
    batch = from_data(data, inputs, seed=1).batch
    assert batch.tokens.reshape(3, 8).tolist() == [list(range(48, 56))] * 3
