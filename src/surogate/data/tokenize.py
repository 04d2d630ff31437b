"""Turn a `datasets:` entry into a tokenised dataset: read it from the cache, or tokenise into it on all cores."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import tokenizers
from pydantic import BaseModel

from surogate_core.api import DatasetFormatDef, Omission
from surogate_core.errors import ConfigError, RunStopped

from ..config.dataset_entry import DatasetEntry
from ..machine.progress import Progress, print_notice
from .cache import (
    CACHE_FORMAT,
    DamagedCache,
    TokenDataset,
    cache_lock,
    cache_name,
    default_cache_root,
    open_cache,
    token_dtype,
)
from .chat.conversation import CONVERSATION
from .chat.media import MEDIA_COLUMNS
from .chat.row_tokenizer import RowTokenizer
from .encode_rows import EncodedRows, divide_of, encode_rows, texts_of
from .old_caches import name_before
from .row import Row
from .sources import Source, open_source
from .token_writer import Counts, TokenWriter

CHUNK_ROWS = 256
CHUNK_CHARS = 1 << 20
_MOST_BAD = 1000
"""Rows that are refused before tokenizing ends."""
_SHOWN_BAD = 5
SHARD_TOKENS = 1 << 22
"""Tokens per shard. A finished shard (every few seconds) survives if the process is killed."""

Notice = Callable[[str], None]
OpenSaved = Callable[[Path, Mapping[str, Any], BaseModel], TokenDataset]
"""(root of the caches, settings, options) -> the tokens of a checkpoint in place of those of the settings."""
OnProgress = Callable[[Counts], None]
"""Called with what is done so far."""


def tokenize_dataset(
    entry: DatasetEntry,
    format_def: DatasetFormatDef,
    options: BaseModel,
    tokenizer: RowTokenizer,
    cache_root: Path | None = None,
    *,
    where: str = "datasets",
    notice: Notice = print_notice,
    moved: Notice = lambda what: None,
    source: Source | None = None,
    rows: int | None = None,
    skip_bad: bool = False,
    saved: OpenSaved | None = None,
) -> TokenDataset:
    """Return the documents of `entry` as tokens, memory-mapped from the cache in `cache_root`.

    source: the rows, if they are already open. rows: their number, if it is known. skip_bad: leave out rows that the
    type refuses, and count them. notice: called with lines for the user, among them the parts of rows that are not in
    the tokens, also if the tokens come from the cache. moved: called with what is being tokenised, again and again.
    saved: opens another cache in place of that of the settings.

    The key of the cache is a hash over the content of the data, the tokenizer and the settings, but not sequence_len.
    If the dataset is missing or damaged, the rows are streamed and tokenised in threads, starting after the last shard
    that an interrupted process has finished. Memory is bounded by a few chunks of rows and the longest row. A second
    process that needs the same dataset waits for it and maps it too.

    Raises ConfigError, naming file and line, if the data cannot be used, and RunStopped if the disk is full.
    """
    opened = source or open_source(entry, getattr(options, "sample_by", "document"), where)
    with Progress(f"{where}: tokenizing", "rows", rows, notice) as shown:
        settings = _settings(opened, format_def, options, tokenizer) | ({"bad_rows": "skip"} if skip_bad else {})
        root = cache_root or default_cache_root()
        directory = root / cache_name(settings)

        def write(writer: TokenWriter) -> None:
            def show(done: Counts) -> None:
                moved(f"tokenising {entry.path}, row {done.rows:,}")
                shown(done.rows, f" ({done.n_tokens:,} tokens)")

            _write(writer, opened, format_def, options, tokenizer, show, skip_bad)
            if writer.counts.n_docs == 0:
                raise ConfigError(f"{where}: path: {entry.path}: {_no_documents(writer)}")
            writer.publish(settings)

        before = name_before(settings)
        # damage is checked again and reported under the lock
        dataset = saved(root, settings, options) if saved else _open(directory, notice=None)
        if dataset is None and before is not None:
            dataset = _open(directory.with_name(before), notice)
        if dataset is None:
            dtype, columns = token_dtype(tokenizer.vocab_size), {c.name: c.per for c in format_def.columns}
            writer = partial(TokenWriter, directory, dtype, columns, format_def.group_size)
            dataset = _written(directory, writer, write, where, notice, moved)
    for line in omission_lines(dataset.omissions):
        notice(f"{where}: left out: {line}")
    return replace(dataset, where=lambda document: opened.place(*dataset.place(document)))


def omission_lines(found: Iterable[tuple[Omission, str]]) -> Iterator[str]:
    """Yield a line for each kind of omission: "the reasoning of 2 of 3 answers: why (first: rows.jsonl:7)"."""
    for omission, first in found:
        if omission.count:
            what = f"{omission.what} of " if omission.what else ""
            yield f"{what}{omission.count:,} of {omission.of:,} {omission.unit}: {omission.why} (first: {first})"


def _written(
    directory: Path,
    make: Callable[[], TokenWriter],
    write: Callable[[TokenWriter], None],
    where: str,
    notice: Notice,
    moved: Notice,
) -> TokenDataset:
    """Return the dataset in `directory` after `write` has written and published it, here or in another process."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with cache_lock(directory.with_name(f"{directory.name}.lock"), notice, moved):
            cached = _open(directory, notice)
            if cached is not None:
                return cached
            with make() as writer:
                if writer.shards:
                    notice(
                        f"{where}: continuing after {writer.shards:,} shards ({writer.counts.n_tokens:,} tokens) that "
                        "an interrupted process has tokenised"
                    )
                try:
                    write(writer)
                except (KeyboardInterrupt, SystemExit):
                    kept = f"{writer.shards:,} finished shards are kept: the next run continues there"
                    none = "no shard was finished, so nothing is kept: the next run starts anew"
                    notice(f"{where}: interrupted; {kept if writer.shards else none}")
                    raise
    except OSError as error:
        raise cache_error(error, directory.parent) from error
    return open_cache(directory)


def _no_documents(writer: TokenWriter) -> str:
    reasons = [why for what, _, why, count, *_ in writer.counts.omissions if not what and count]
    if not reasons:
        return "every row is empty. Use other data."
    return f"every row is left out: {'; '.join(reasons)}. Correct the rows or the chat template, or use other data."


def _open(directory: Path, notice: Notice | None) -> TokenDataset | None:
    """Open the cache in `directory`. Return None if it does not exist, or is damaged, which `notice` reports."""
    if not directory.exists():
        return None
    try:
        return open_cache(directory)
    except DamagedCache as damage:
        if notice is not None:
            notice(f"the token cache is damaged and will be rebuilt: {damage}")
        return None


def _settings(
    source: Source, format_def: DatasetFormatDef, options: BaseModel, tokenizer: RowTokenizer
) -> dict[str, str | int | dict[str, Any]]:
    """Return everything that determines the tokens."""
    return {
        "cache_format": CACHE_FORMAT,
        "content": source.content_hash(),
        "type": format_def.name,
        "version": format_def.version,
        **({"conversation": CONVERSATION.version} if format_def.origin else {}),  # types of plugins may call it
        "options": options.model_dump(mode="json"),
        "tokenizer": tokenizer.fingerprint,
        "tokenizers": tokenizers.__version__,
    }


def cache_error(error: OSError, root: Path) -> ConfigError | RunStopped:
    """Return the error to raise if a file in `root` cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunStopped(f"token cache {root}: the disk is full. Free space, or set XDG_CACHE_HOME to another disk.")
    return ConfigError(
        f"token cache {root}: cannot be written: {error.strerror or error}. Set XDG_CACHE_HOME to a writable directory."
    )


def _write(
    writer: TokenWriter,
    source: Source,
    format_def: DatasetFormatDef,
    options: BaseModel,
    tokenizer: RowTokenizer,
    progress: OnProgress,
    skip_bad: bool,
) -> None:
    """Tokenise in threads, and append in the order of the rows."""
    columns = list(format_def.fields(options))
    workers = len(os.sched_getaffinity(0))
    done = writer.counts
    kept = done.n_tokens
    pending: deque[Future[EncodedRows]] = deque()
    bad: list[ConfigError] = []
    refused = False  # the row whose parts follow

    def drain(limit: int) -> None:
        nonlocal kept, refused
        while len(pending) > limit:
            chunk = pending.popleft().result()
            bad.extend(chunk.bad)
            if len(bad) >= _MOST_BAD:
                raise _refused(bad)
            if bad:  # nothing is kept: only the rest of the bad rows is counted
                continue
            if chunk.first:
                refused = not chunk.last and not len(chunk.places)
            if chunk.first and chunk.last:
                writer.append(chunk.tokens, chunk.trained, chunk.lengths, chunk.places, chunk.columns)
            elif not refused:
                writer.append_part(chunk.tokens, chunk.trained)
                if chunk.last:
                    done.empty_rows += not writer.end_document(chunk.places)
            for omission, at in chunk.omissions:
                writer.omit(omission, at)
            done.n_bytes += 0 if refused else chunk.n_bytes
            done.empty_rows += chunk.empty
            done.rows += chunk.rows
            if chunk.last and done.n_tokens - kept >= SHARD_TOKENS:
                writer.finish_shard()
                kept = done.n_tokens
            progress(done)

    ended = Event()
    with ThreadPoolExecutor(workers) as pool:
        try:
            divide = divide_of(format_def, tokenizer)
            media = [name for name in MEDIA_COLUMNS if name not in columns]
            optional = [*format_def.optional(options), *media]
            rows_left = _after(source.rows([*columns, *media], optional, divide), done.rows)
            for rows in _chunks(rows_left, columns):
                pending.append(pool.submit(encode_rows, rows, columns, format_def, options, tokenizer, skip_bad, ended))
                drain(2 * workers)
            drain(0)
            if bad:
                raise _refused(bad)
        except BaseException:
            for future in pending:
                future.cancel()
            ended.set()
            raise


def _refused(bad: Sequence[ConfigError]) -> ConfigError:
    """Return the error to raise for the rows that are refused, in the order of the rows."""
    remedy = "Correct these rows, or leave them out and count them (bad_rows: skip)."
    if len(bad) == 1:
        return ConfigError(f"{bad[0]} Or set bad_rows: skip, which leaves such rows out and counts them.")
    count = f"{'at least ' if len(bad) >= _MOST_BAD else ''}{len(bad):,}"
    shown = "\n".join(f"  {error}" for error in bad[:_SHOWN_BAD])
    return ConfigError(f"{count} rows cannot be used. {remedy} The first:\n{shown}")


def _after(rows: Iterator[Row], done: int) -> Iterator[Row]:
    """Yield what is left after the first `done` rows."""
    for row in rows:
        if done:
            done -= row.last
        else:
            yield row


def _chunks(rows: Iterator[Row], columns: Sequence[str]) -> Iterator[list[Row]]:
    """Yield lists of at most CHUNK_ROWS rows; a list ends with the row that reaches CHUNK_CHARS characters.

    A part of a row is alone.
    """
    chunk: list[Row] = []
    chars = 0
    for row in rows:
        if row.is_part:
            if chunk:
                yield chunk
            yield [row]
            chunk, chars = [], 0
            continue
        chunk.append(row)
        chars += sum(len(text) for text in texts_of(row.values, columns))
        if len(chunk) == CHUNK_ROWS or chars >= CHUNK_CHARS:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk
