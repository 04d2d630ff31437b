"""The data of a run: every dataset that the config names, tokenised, split, packed and proven."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ..api import DatasetFormatDef
from ..config_schema import DatasetEntry, TrainConfig
from ..errors import ConfigError
from .pack import DocumentSpans, PackedRows, pack, split_validation
from .proof import check_rows, label_bytes, label_counts, unigram_loss
from .sources import columns_of, open_source
from .tokenize import tokenize_dataset
from .tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """Rows to train and to validate on. validation: None without any.

    unigram_loss: nats a label of validation, of the model that knows only token frequencies. validation_labels and
    validation_bytes: labels of the whole validation set and the bytes of text that they stand for.
    """

    tokenizer: Tokenizer
    train: PackedRows
    validation: PackedRows | None
    unigram_loss: float | None = None
    validation_labels: int = 0
    validation_bytes: int = 0


def load_corpora(
    config: TrainConfig,
    formats: Mapping[str, DatasetFormatDef],
    model_dir: Path,
    vocab_size: int,
    notice: Callable[[str], None],
) -> Corpora:
    """Tokenise (or map from the cache), split, pack and check. Raises ConfigError naming key, file and line."""
    _set_threads(config.dataloader_num_workers)
    tokenizer = Tokenizer(model_dir, f"model: {config.model}")
    documents = _documents(config.datasets, "datasets", formats, tokenizer, notice)
    if config.validation_datasets:
        held_out = _documents(config.validation_datasets, "validation_datasets", formats, tokenizer, notice)
    else:
        documents, held_out = split_validation(documents, config.validation_split_ratio, config.eval_seed)
    train = pack(documents, config.sequence_len, config.sample_packing)
    check_rows(train, vocab_size, "datasets")
    validation = pack(held_out, config.sequence_len, config.sample_packing)
    if validation.n_rows == 0:
        return Corpora(tokenizer=tokenizer, train=train, validation=None)
    check_rows(validation, vocab_size, "validation_datasets" if config.validation_datasets else "datasets")
    counts = label_counts(validation, vocab_size)
    return Corpora(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        unigram_loss=unigram_loss(label_counts(train, vocab_size), counts, vocab_size),
        validation_labels=int(counts.sum()),
        validation_bytes=label_bytes(counts, tokenizer.token_bytes),
    )


def _set_threads(workers: int | str) -> None:
    """The tokenizers library reads its number of threads from the environment, when it first tokenises."""
    if workers == 0:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    elif workers != "auto":
        os.environ["RAYON_NUM_THREADS"] = str(workers)


def _documents(
    entries: Sequence[DatasetEntry],
    key: str,
    formats: Mapping[str, DatasetFormatDef],
    tokenizer: Tokenizer,
    notice: Callable[[str], None],
) -> DocumentSpans:
    datasets = []
    for index, entry in enumerate(entries):
        where = f"{key}.{index}"
        chosen = _format(entry, formats, where)
        options = _options(entry, chosen, where)
        datasets.append(tokenize_dataset(entry, chosen, options, tokenizer, where=where, notice=notice))
    return DocumentSpans.of(datasets)


def _format(entry: DatasetEntry, formats: Mapping[str, DatasetFormatDef], where: str) -> DatasetFormatDef:
    """The named type, or for `auto` the one that fits the columns of the first row."""
    if entry.type != "auto":
        return formats[entry.type]
    columns = columns_of(open_source(entry, where=where))
    fitting = [f for f in formats.values() if f.matches(columns)]
    if len(fitting) != 1:
        told = ", ".join(f.name for f in fitting) or "none"
        raise ConfigError(
            f"{where}: type: auto: columns {', '.join(columns)} fit these types: {told}. "
            f"Set type to one of {', '.join(formats)}."
        )
    return fitting[0]


def _options(entry: DatasetEntry, chosen: DatasetFormatDef, where: str) -> BaseModel:
    try:
        return chosen.options(**entry.options)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{where}: {name}: {problem['msg']} (type {chosen.name}).") from None
