"""The data of a run: every dataset of the config, tokenised, split, packed and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from surogate_core.api import DatasetFormatDef, Encoded
from surogate_core.api.proven_file import DamagedFile
from surogate_core.errors import ConfigError

from ..config.dataset_entry import DatasetEntry
from ..config.schema import TrainConfig
from ..machine.progress import print_notice
from .asked import ASKS_NOTHING, Asked
from .cache import TokenDataset, default_cache_root
from .chat.row_tokenizer import RowTokenizer
from .checks import check_rows, label_bytes, label_counts, unigram_loss
from .columns import Columns, unused_columns
from .encode_rows import encode_rows
from .pack import DocumentSpans, PackedRows, pack, split_validation
from .row import Wanted, missing_column, with_columns
from .row_hashes import caches_hash
from .saved_caches import SavedCaches, with_saved
from .saved_tokens import SavedTokens
from .sources import Source, count_columns, open_source
from .spans import duplicates, truncate, weigh
from .tokenize import cache_error, omission_lines, tokenize_dataset
from .tokenizer import Tokenizer
from .turn_ends import trained_ends, unknown_ends

_MOST_NAMES = 5  # tokens that a notice spells out


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """Rows to train on and, unless `validation` is None, to validate on.

    turn_ends: added tokens with which trained parts end. unigram_loss: nats per validation label of a model that knows
    only token frequencies. validation_labels, validation_bytes: labels of the whole validation set, and the bytes of
    text they stand for.
    """

    tokenizer: RowTokenizer
    train: PackedRows
    validation: PackedRows | None
    turn_ends: tuple[int, ...] = ()
    unigram_loss: float | None = None
    validation_labels: int = 0
    validation_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenizedRow:
    """A row of the dataset type `type`, at the place `where`.

    left_out: a line for each part that is not in `documents`.
    """

    where: str
    type: str
    tokenizer: RowTokenizer
    documents: Sequence[Encoded]
    left_out: Sequence[str]


def tokenize_row(
    config: TrainConfig, formats: Mapping[str, DatasetFormatDef], model_dir: Path, place: str
) -> TokenizedRow:
    """Tokenise the first row at `place`, such as rows.jsonl:7, whose folders may be left out.

    Raises ConfigError if there is none, or if its type refuses it.
    """
    tokenizer = RowTokenizer(model_dir, f"model: {config.model}", day_of(config))
    wanted = f"/{place.removeprefix('./').lstrip('/')}"
    entries = {f"datasets.{index}": entry for index, entry in enumerate(config.datasets)}
    entries |= {f"validation_datasets.{index}": entry for index, entry in enumerate(config.validation_datasets or ())}
    for key, entry in entries.items():
        source = source_of(entry, key)
        row = next((row for row in source.rows(None) if f"{Path.cwd()}/{row.where}".endswith(wanted)), None)
        if row is None:
            continue
        chosen, options = format_of(source, entry, formats, config.loss_scale, key)
        _refuse_unread_variables(tokenizer, options, key)
        columns = chosen.fields(options)
        row = with_columns(row, Wanted(columns, chosen.optional(options)))
        found = encode_rows([row], columns, chosen, options, tokenizer, skip_bad=False)
        if found.bad:
            raise found.bad[0]
        stops = np.cumsum(found.lengths)
        spans = [slice(*span) for span in zip(stops - found.lengths, stops, strict=True)]
        return TokenizedRow(
            where=row.where,
            type=chosen.name,
            tokenizer=tokenizer,
            documents=[Encoded(found.tokens[span].tolist(), found.trained[span].tolist()) for span in spans],
            left_out=list(omission_lines(found.omissions)),
        )
    raise ConfigError(
        f"--at {place}: no row of the data is there. Name its place as messages do: rows.jsonl:7, 'rows.json[6]' or "
        "'rows.parquet row 6'."
    )


def load_corpora(
    config: TrainConfig,
    formats: Mapping[str, DatasetFormatDef],
    model_dir: Path,
    vocab_size: int,
    notice: Callable[[str], None],
    moved: Callable[[str], None] = lambda what: None,
    asked: Asked = ASKS_NOTHING,
    saved: SavedTokens | None = None,
) -> Corpora:
    """Tokenise (or map from the cache), split, pack and check the data. Raises ConfigError naming key, file, line.

    `moved` is called with what is being tokenised, again and again. `asked`: what the run's loss reads. Cached files
    that turn out to be damaged are made anew. `saved`: the caches that are used for `datasets` in place of the present
    ones.
    """
    found = ""
    load = partial(_load, config, formats, model_dir, vocab_size, notice, moved, asked)
    while True:
        try:
            return load() if saved is None else with_saved(load, saved, lambda corpora: caches_hash(corpora.train))
        except DamagedFile as damage:
            if not damage.made_anew or damage.what == found:
                raise
            found = damage.what


def _load(
    config: TrainConfig,
    formats: Mapping[str, DatasetFormatDef],
    model_dir: Path,
    vocab_size: int,
    notice: Callable[[str], None],
    moved: Callable[[str], None],
    asked: Asked,
    caches: SavedCaches | None = None,
) -> Corpora:
    moved("loading the data")
    # The tokenizers library reads its number of threads from the environment on first use.
    if config.dataloader_num_workers == 0:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    elif config.dataloader_num_workers != "auto":
        os.environ["RAYON_NUM_THREADS"] = str(config.dataloader_num_workers)
    tokenizer = RowTokenizer(model_dir, f"model: {config.model}", day_of(config))
    _note_extra_tokens(tokenizer, vocab_size, notice)
    documents = every = _documents(config, "datasets", formats, tokenizer, notice, moved, asked, caches)
    if config.validation_datasets:
        for index, entry in enumerate(config.validation_datasets):
            if entry.weight is not None:
                raise ConfigError(f"validation_datasets.{index}: weight is for training data. Use samples instead.")
        held_out = _documents(config, "validation_datasets", formats, tokenizer, notice, moved, asked)
    else:
        piece = 1 if asked.prepare is None else config.sequence_len  # the loss reads documents in such pieces
        documents, held_out = split_validation(documents, config.validation_split_ratio, config.eval_seed, piece)
    moved("packing the data")
    repeated = duplicates(every, documents, held_out)
    if repeated is not None:
        notice(f"datasets: {repeated}")
    weights = [1.0 if entry.weight is None else entry.weight for entry in config.datasets]
    train = pack(weigh(documents, weights, config.train_seed), config.sequence_len, config.sample_packing, asked)
    check_rows(train, vocab_size, "datasets")
    ends = trained_ends(train.corpus.datasets, tokenizer)
    if line := unknown_ends(ends, tokenizer, model_dir):
        notice(line)
    validation = pack(held_out, config.sequence_len, config.sample_packing, asked)
    if validation.n_rows == 0:
        return Corpora(tokenizer=tokenizer, train=train, validation=None, turn_ends=ends)
    check_rows(validation, vocab_size, "validation_datasets" if config.validation_datasets else "datasets")
    counts = label_counts(validation, vocab_size)
    return Corpora(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        turn_ends=ends,
        unigram_loss=unigram_loss(label_counts(train, vocab_size), counts, vocab_size),
        validation_labels=int(counts.sum()),
        validation_bytes=label_bytes(counts, tokenizer.token_bytes),
    )


def _note_extra_tokens(tokenizer: Tokenizer, vocab_size: int, notice: Callable[[str], None]) -> None:
    """Warn if transformers adds tokens beyond the model's vocabulary: training never uses them, a prompt might."""
    size, added = tokenizer.size_in_transformers, tokenizer.added_by_transformers
    if size > vocab_size and added:
        named = ", ".join(added[:_MOST_NAMES]) + (
            f" and {len(added) - _MOST_NAMES} more" if added[_MOST_NAMES:] else ""
        )
        notice(
            f"model: the tokenizer has {size:,} tokens in transformers, the model only {vocab_size:,}: "
            f"{tokenizer.directory} names {named}, which tokenizer.json lacks. Training never uses them; a prompt with "
            "one of them fails in the base and in the model that is saved. Remove them from the tokenizer's files."
        )


def _documents(
    config: TrainConfig,
    key: Literal["datasets", "validation_datasets"],
    formats: Mapping[str, DatasetFormatDef],
    tokenizer: RowTokenizer,
    notice: Callable[[str], None],
    moved: Callable[[str], None],
    asked: Asked,
    caches: SavedCaches | None = None,
) -> DocumentSpans:
    parts = []
    for index, entry in enumerate(getattr(config, key)):
        where = f"{key}.{index}"
        source = source_of(entry, where)
        try:
            chosen, options = format_of(source, entry, formats, config.loss_scale, where, notice)
            columns = _columns(source, notice)
        except (KeyboardInterrupt, SystemExit):
            notice(f"{where}: interrupted while the columns of the rows were counted; nothing is kept")
            raise
        _refuse_unread_variables(tokenizer, options, where)
        strategy = config.truncation_strategy or chosen.truncation
        asked.check(chosen, formats.values(), where, strategy)
        for column in _named(options, chosen.optional(options)):
            if column not in columns.filled:  # the key that names it is wrong
                raise missing_column(f"{where}: path: {entry.path}", column, list(columns.filled))
        dataset = tokenize_dataset(
            entry,
            chosen,
            options,
            tokenizer,
            where=where,
            notice=notice,
            moved=moved,
            source=source,
            rows=columns.rows,
            skip_bad=entry.bad_rows == "skip",
            saved=partial(caches.open, index, where) if caches else None,
        )
        for line in _left_out(columns, source, dataset, chosen, options, formats):
            notice(f"{where}: {line}")
        of_run = {"model_dir": tokenizer.directory, "sequence_len": config.sequence_len}
        dataset = asked.complete(dataset, **of_run, notice=notice, progress=moved)
        spans = truncate(DocumentSpans.of([dataset]), config.sequence_len, strategy, where, notice)
        if len(spans) == 0:
            raise ConfigError(
                f"{where}: path: {entry.path}: no document remains with truncation_strategy: {strategy} and "
                f"sequence_len: {config.sequence_len}. Raise sequence_len."
            )
        parts.append(spans)
    return DocumentSpans.joined(parts)


def _columns(source: Source, notice: Callable[[str], None]) -> Columns:
    root = default_cache_root()
    try:
        return count_columns(source, root, notice)
    except OSError as error:
        raise cache_error(error, root) from error


def _named(options: BaseModel, columns: Sequence[str]) -> list[str]:
    """Return those of `columns` that are not just the default of a key."""
    unset = [getattr(options, key) for key in type(options).model_fields if key not in options.model_fields_set]
    return [column for column in columns if column not in unset]


def _left_out(
    columns: Columns,
    source: Source,
    dataset: TokenDataset,
    chosen: DatasetFormatDef,
    options: BaseModel,
    formats: Mapping[str, DatasetFormatDef],
) -> Iterator[str]:
    """Yield a line for each kind of data that is present but not tokenised."""
    files = source.left_out()
    if files is not None:
        yield files
    guessed = chosen.guess(columns.holding_something())
    unset = {key: column for key, column in guessed.items() if getattr(options, key, None) is None}
    others = _readers(columns.holding_something(), [one for one in formats.values() if one is not chosen])
    unused = unused_columns(columns, chosen.fields(options), unset, others)
    if unused is not None:
        yield unused
    if dataset.empty_rows:
        yield f"{dataset.empty_rows:,} of {columns.rows:,} rows are empty and left out"


def _readers(columns: Sequence[str], formats: Sequence[DatasetFormatDef]) -> dict[str, str]:
    """Return {column: what reads it} of the dataset types that find all that they need in the columns."""
    found: dict[str, str] = {}
    for one in formats:
        if any(field.is_required() for field in one.options.model_fields.values()):
            continue  # it reads nothing without a key
        options = one.options()
        fields, optional = one.fields(options), one.optional(options)
        if all(name in columns for name in fields if name not in optional):
            found |= {name: f"type: {one.name} reads it, {one.summary}" for name in fields if name not in optional}
    return found


def day_of(config: TrainConfig) -> date:
    """Return the date that chat templates write which ask for one."""
    return date.fromisoformat(config.template_date) if config.template_date else date.today()


def source_of(entry: DatasetEntry, where: str) -> Source:
    """Open the rows of an entry."""
    return open_source(entry, str(entry.options.get("sample_by", "document")), where)


def format_of(
    source: Source,
    entry: DatasetEntry,
    formats: Mapping[str, DatasetFormatDef],
    loss_scale: str,
    where: str,
    notice: Callable[[str], None] = print_notice,
) -> tuple[DatasetFormatDef, BaseModel]:
    """Return the dataset type of an entry (for `auto`, the one that fits the columns), and its options."""
    named = formats.get(entry.type)
    asks = named is None or named.found is not DatasetFormatDef.found
    found = _columns(source, notice) if asks else None
    if found is not None and not found.rows:
        raise ConfigError(f"{where}: path: {entry.path}: contains no rows. Remove it, or create it again.")
    columns = sorted(found.holding_something()) if found else []
    if named is not None:
        return named, _options(entry, named, named.found(columns), loss_scale, where)
    fitting = [f for f in formats.values() if f.matches(columns)]
    if len(fitting) != 1:
        names = ", ".join(f.name for f in fitting) or "none"
        raise ConfigError(
            f"{where}: type: auto: columns {', '.join(columns) or '(all empty)'} fit these types: {names}. "
            f"Set type to one of {', '.join(formats)}."
        )
    guessed = {**fitting[0].found(columns), **fitting[0].guess(columns)}
    return fitting[0], _options(entry, fitting[0], guessed, loss_scale, where)


def _refuse_unread_variables(tokenizer: Tokenizer, options: BaseModel, where: str) -> None:
    """Raise ConfigError, once and not for every row, for variables that the chat template does not read."""
    variables, template = getattr(options, "chat_template_kwargs", None), tokenizer.chat_template
    if variables and template is not None:
        try:
            template.with_variables(variables)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def _options(
    entry: DatasetEntry, chosen: DatasetFormatDef, guessed: Mapping[str, Any], loss_scale: str, where: str
) -> BaseModel:
    general = {"loss_scale": loss_scale} if "loss_scale" in chosen.options.model_fields else {}
    try:
        return chosen.options(**{**general, **guessed, **entry.options})
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{where}: {name}: {problem['msg']} (type {chosen.name}).") from None
