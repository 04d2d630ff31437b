"""`surogate tokenize`: counts of a run's tokens, and its first rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from ..data.pack import PackedRows
from ..data.tokenize import print_notice
from .options import RunArguments
from .render import output_width, paint

_SHOWN_TOKENS: Final = 1000
"""Tokens of a row that are shown at most."""


def tokenize_command(arguments: RunArguments, rows: int) -> int:
    """Tokenize and check the data of a run. Print counts and the first `rows` rows of the training data."""
    loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
    data = run.tokenize(loaded, print_notice)
    print("\n".join(_summary(loaded, data)))
    if rows:
        print(f"\n{_legend()}")
        width = output_width()
        console = Console(width=width or 80, highlight=False, soft_wrap=width is None)
        for row in range(min(rows, data.train.n_rows)):
            console.print()
            console.print(_row(data, row))
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
        yield f"{name:<10}{_packed(rows, length)}"


def _dataset(dataset: TokenDataset) -> Iterator[str]:
    lengths = np.diff(dataset.offsets)
    shortest, median, most, longest = np.percentile(lengths, [0, 50, 99, 100], method="nearest")
    yield f"  documents {dataset.n_docs:>15,}"
    yield f"  tokens    {dataset.n_tokens:>15,}"
    yield f"  trained   {dataset.n_trained:>15,}   {dataset.n_trained / dataset.n_tokens:.1%} of the tokens"
    yield f"  lengths   {shortest:,} to {longest:,} tokens, median {median:,}, 99 % up to {most:,}"
    if dataset.path is not None:
        yield f"  cache     {dataset.path}"


def _packed(rows: PackedRows, length: int) -> str:
    padding = 1 - rows.n_tokens / (rows.n_rows * length)
    return f"{rows.n_tokens:,} tokens in {rows.n_rows:,} rows of {length:,}, {padding:.1%} padding"


def _legend() -> str:
    if sys.stdout.isatty():
        return f"{paint('trained', 'green')}, {paint('masked', 'dim')}, {paint('padding', 'yellow')}"
    return "[[trained]], masked; padding is counted at the end of a row"


def _row(data: Corpora, row: int) -> Text:
    """Return a packed row as text: its documents, then the number of padding positions."""
    rows, plain = data.train, not sys.stdout.isatty()
    shown = Text(f"row {row}", style="bold")
    used = 0
    for piece in range(int(rows.row_offsets[row]), int(rows.row_offsets[row + 1])):
        start, stop = int(rows.start[piece]), int(rows.stop[piece])
        size = min(stop - start, max(0, _SHOWN_TOKENS - used))
        used += stop - start
        if size == 0:
            continue
        tokens, trained = rows.corpus.read(np.arange(start, start + size))
        shown.append(f"\ndocument of {stop - start:,} tokens\n", style="not bold cyan")
        for text, is_trained in runs(Encoded(tokens.tolist(), trained.tolist()), data.tokenizer):
            visible = _visible(text)
            if is_trained:
                shown.append(f"[[{visible}]]" if plain else visible, style="not bold green")
            else:
                shown.append(visible, style="not bold dim")
        if size < stop - start:
            shown.append(f" ... {stop - start - size:,} more tokens", style="not bold cyan")
    padding = rows.sequence_len - used
    shown.append(f"\n{padding:,} of {rows.sequence_len:,} positions are padding", style="not bold yellow")
    return shown


def _visible(text: str) -> str:
    """Mark line breaks and escape control characters, which would otherwise control the terminal."""
    return "".join(
        "⏎\n" if char == "\n" else char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )
