"""Checks of the data before the first step, and reference figures for its loss."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from surogate_core.errors import ConfigError

from .loader import eval_batches
from .pack import PackedRows

COUNTED_LABELS = 50_000_000
"""Most labels that `label_counts` reads. Larger sets are sampled, which is accurate to a thousandth of a nat."""


def check_rows(rows: PackedRows, vocab_size: int, key: str = "datasets") -> None:
    """Raise ConfigError, beginning with `key`, if the rows cannot train a model with `vocab_size` tokens."""
    if rows.n_rows == 0:
        raise ConfigError(f"{key}: no document has two tokens or more, so there is nothing to predict. Use other data.")
    for dataset in rows.corpus.datasets:
        if dataset.max_token >= vocab_size:
            raise ConfigError(
                f"{key}: token {dataset.max_token} is outside the model's vocab_size of {vocab_size}. "
                "Use the tokenizer that belongs to the model; or, if it has new tokens, give the model rows for them "
                "first: model.resize_token_embeddings(len(tokenizer)) in transformers, then save_pretrained."
            )
    if not any(batch.n_valid for (batch,) in eval_batches(rows, 1)):
        raise ConfigError(f"{key}: no token is trained: the dataset's type masks all of them. Check its options.")
    if rows.asked.prepass and not any(batch.before and batch.before.n_groups for (batch,) in eval_batches(rows, 1)):
        raise ConfigError(
            f"{key}: loss: {rows.asked.loss} also reads each document of a row beside the others, but no row has two. "
            "Raise sequence_len, and leave sample_packing on."
        )


def label_counts(rows: PackedRows, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return how often each token is a label, int64 [vocab_size], over at most about COUNTED_LABELS labels."""
    counts = np.zeros(vocab_size, np.int64)
    batch_size = max(1, (1 << 18) // rows.sequence_len)
    limit = -(-COUNTED_LABELS // (batch_size * rows.sequence_len))
    for (batch,) in eval_batches(rows, batch_size, limit * batch_size):
        counts += np.bincount(batch.targets[batch.targets >= 0], minlength=vocab_size)
    return counts


def unigram_loss(train_labels: npt.NDArray[np.int64], valid_labels: npt.NDArray[np.int64], vocab_size: int) -> float:
    """Return the mean validation loss, in nats, of a model that knows only the frequency of each label.

    train_labels, valid_labels: results of `label_counts`; one is added to each training count. Raises ConfigError if
    there is no validation label.
    """
    labels = int(valid_labels.sum())
    if labels == 0:
        raise ConfigError("validation set: no token is a label. Raise validation_split_ratio, or use more data.")
    log_p = np.log(train_labels + 1.0) - math.log(int(train_labels.sum()) + vocab_size)
    return float(-(valid_labels @ log_p) / labels)


def label_bytes(valid_labels: npt.NDArray[np.int64], token_bytes: npt.NDArray[np.int32]) -> int:
    """Return the UTF-8 bytes of text that the labels stand for. token_bytes: `Tokenizer.token_bytes`."""
    known = min(len(valid_labels), len(token_bytes))
    return int(valid_labels[:known] @ token_bytes[:known].astype(np.int64))


def bits_per_byte(loss: float, valid_tokens: int, n_bytes: int) -> float:
    """Convert a mean loss in nats over `valid_tokens` labels, which stand for `n_bytes` of text, to bits per byte.

    Unlike the loss, bits per byte can be compared between tokenizers.
    """
    if n_bytes < 1:
        raise ConfigError(f"validation set: {n_bytes} bytes of text in its labels. Use data with text.")
    return loss * valid_tokens / n_bytes / math.log(2)
