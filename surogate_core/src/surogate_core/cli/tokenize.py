"""`surogate tokenize`: counts of a run's tokens, some documents, and its first rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Final

import numpy as np
from rich.console import Console
from rich.text import Text

from .. import run
from ..api import Encoded
from ..config.load import LoadedConfig
from ..data.cache import TokenDataset
from ..data.chat.token_spans import runs
from ..data.corpora import Corpora
from ..errors import ConfigError
from ..machine.progress import print_notice
from .options import RunArguments
from .render import output_width, paint

_SHOWN_TOKENS: Final = 1000
"""Tokens of a document or a row that are shown at most."""


def tokenize_command(arguments: RunArguments, rows: int, debug: bool, at: int | None) -> int:
    """Tokenize and check the data of a run and print counts.

    debug  also print documents and the first `rows` rows of the training data
    at     also print this document, counted from 1 over all training data
    """
    loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
    data = run.tokenize(loaded, print_notice)
    print("\n".join(_summary(loaded, data)))
    if not debug and at is None:
        return 0
    print(f"\n{_legend()}")
    width = output_width()
    console = Console(width=width or 80, highlight=False, soft_wrap=width is None)
    shown_rows = range(min(rows, data.train.n_rows)) if at is None else ()
    for shown in chain(_documents(loaded, data, at), (_row(data, row) for row in shown_rows)):
        console.print()
        console.print(shown)
    return 0


def _summary(loaded: LoadedConfig, data: Corpora) -> Iterator[str]:
    entries = list(loaded.config.datasets)
    datasets = list(data.train.corpus.datasets)
    if loaded.config.validation_datasets and data.validation is not None:
        entries += loaded.config.validation_datasets
        datasets += data.validation.corpus.datasets
    for entry, dataset in zip(entries, datasets, strict=True):
        yield f"{entry.path} ({entry.type})"
        yield from _dataset(dataset)
        yield ""
    length = loaded.config.sequence_len
    parts = {"train": data.train} | ({"validate": data.validation} if data.validation else {})
    for name, rows in parts.items():
        padding = 1 - rows.n_tokens / (rows.n_rows * length)
        yield f"{name:<10}{rows.n_tokens:,} tokens in {rows.n_rows:,} rows of {length:,}, {padding:.1%} padding"


def _dataset(dataset: TokenDataset) -> Iterator[str]:
    lengths = np.diff(dataset.offsets)
    shortest, median, most, longest = np.percentile(lengths, [0, 50, 99, 100], method="nearest")
    yield f"  documents {dataset.n_docs:>15,}"
    yield f"  tokens    {dataset.n_tokens:>15,}"
    yield f"  trained   {dataset.n_trained:>15,}   {dataset.n_trained / dataset.n_tokens:.1%} of the tokens"
    yield f"  lengths   {shortest:,} to {longest:,} tokens, median {median:,}, 99 % up to {most:,}"
    if dataset.path is not None:
        yield f"  cache     {dataset.path}"


def _legend() -> str:
    if sys.stdout.isatty():
        return f"{paint('trained', 'green')}, {paint('masked', 'dim')}, {paint('padding', 'yellow')}"
    return "[[trained]], masked; padding is counted at the end of a row"


def _documents(loaded: LoadedConfig, data: Corpora, at: int | None) -> Iterator[Text]:
    """Yield the shortest, the median and the longest document of each entry, or only document `at`, as text."""
    corpus = data.train.corpus
    count = sum(dataset.n_docs for dataset in corpus.datasets)
    if at is not None and at > count:
        raise ConfigError(f"--at {at}: the training data has {count:,} documents. Give 1 to {count}.")
    before = 0
    for entry, dataset, base in zip(loaded.config.datasets, corpus.datasets, corpus.bases, strict=False):
        by_length = np.argsort(np.diff(dataset.offsets), kind="stable")
        chosen = by_length[[0, len(by_length) // 2, -1]].tolist() if at is None else [at - 1 - before]
        for number in dict.fromkeys(n for n in chosen if 0 <= n < dataset.n_docs):
            start, stop = (dataset.offsets[number : number + 2] + base).tolist()
            shown = Text(f"document {before + number + 1:,} ({entry.path}), {stop - start:,} tokens\n", style="bold")
            yield shown.append(_tokens(data, start, stop, _SHOWN_TOKENS))
        before += dataset.n_docs


def _row(data: Corpora, row: int) -> Text:
    """Return a packed row as text: its documents, then the number of padding positions."""
    rows = data.train
    shown = Text(f"row {row}", style="bold")
    used = 0
    for piece in range(int(rows.row_offsets[row]), int(rows.row_offsets[row + 1])):
        start, stop = int(rows.start[piece]), int(rows.stop[piece])
        if used < _SHOWN_TOKENS:
            shown.append(f"\ndocument of {stop - start:,} tokens\n", style="not bold cyan")
            shown.append(_tokens(data, start, stop, _SHOWN_TOKENS - used))
        used += stop - start
    padding = rows.sequence_len - used
    shown.append(f"\n{padding:,} of {rows.sequence_len:,} positions are padding", style="not bold yellow")
    return shown


def _tokens(data: Corpora, start: int, stop: int, most: int) -> Text:
    """Return the training data at positions `start` to `stop` as text, with at most `most` tokens."""
    end, plain, shown = min(stop, start + most), not sys.stdout.isatty(), Text()
    tokens, trained = data.train.corpus.read(np.arange(start, end))
    for text, is_trained in runs(Encoded(tokens.tolist(), trained.tolist()), data.tokenizer):
        visible = _visible(text)
        marked = f"[[{visible}]]" if plain and is_trained else visible
        shown.append(marked, style="not bold green" if is_trained else "not bold dim")
    if end < stop:
        shown.append(f" ... {stop - end:,} more tokens", style="not bold cyan")
    return shown


def _visible(text: str) -> str:
    """Mark line breaks and escape control characters, which would otherwise control the terminal."""
    return "".join(
        "⏎\n" if char == "\n" else char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )
