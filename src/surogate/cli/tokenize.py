"""`surogate tokenize`: counts of a run's tokens, some documents, or one row of the data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from surogate_core.api import Encoded

from .. import run
from ..config.dataset_entry import DatasetEntry
from ..config.load import LoadedConfig
from ..data.cache import TokenDataset
from ..data.chat.row_tokenizer import RowTokenizer
from ..data.chat.token_spans import runs
from ..data.corpora import Corpora
from ..data.tokenized import documents, lengths, parts, pieces, read, tokenized, whole
from ..machine.progress import print_notice
from ..pages.page import refuse_other
from ..pages.reports import data_page
from ..reporting.text import counted
from .assumed_verb import assumed_verb
from .json_output import print_json
from .options import RunArguments
from .render import output_width, paint
from .written_page import print_written

_SHOWN_TOKENS: Final = 1000
"""Tokens of a document that are shown at most."""


def tokenize_command(arguments: RunArguments, debug: bool, *, as_json: bool = False, html: Path | None = None) -> int:
    """Tokenize and check the data of a run and print counts. debug: also print documents. html: also write a page."""
    if html is not None:
        refuse_other(html)
    loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
    notices: list[str] = []

    def notice(line: str) -> None:
        notices.append(line)
        print_notice(line)

    data = run.tokenize(loaded, notice)
    shown = list(documents(loaded, data)) if debug or html else []
    if html is not None:
        name, folder = loaded.config.resolved_run_name, arguments.config.parent
        print_written(html, data_page(asdict(tokenized(loaded, data, shown)), name, folder, notices, html))
    if as_json:
        print_json(tokenized(loaded, data, shown if debug else ()))
        return 0
    if assumed := assumed_verb(loaded, arguments):
        print(assumed)
    print("\n".join(_summary(loaded, data)))
    if debug:
        print()
        _print(_document(data, *found) for found in shown)
    return 0


def show_row(arguments: RunArguments, place: str, *, as_json: bool = False) -> int:
    """Tokenize one row of the data and print it (`run.tokenize_row`)."""
    row = run.tokenize_row(run.load(arguments.config, arguments.overrides, arguments.mode), place)
    for line in row.left_out:
        print_notice(f"left out: {line}")
    if as_json:
        found = [{"tokens": len(one.tokens), "pieces": pieces(one, row.tokenizer)} for one in row.documents]
        print_json({"row": row.where, "type": row.type, "left_out": row.left_out, "documents": found})
        return 0
    if not row.documents:
        print(f"{row.where} ({row.type}): the row {'is left out' if row.left_out else 'has no tokens'}")
        return 0
    _print(
        Text(f"{row.where} ({row.type}), {len(document.tokens):,} tokens\n", style="bold").append(
            _tokens(document, row.tokenizer)
        )
        for document in row.documents
    )
    return 0


def _print(texts: Iterable[Text]) -> None:
    print(_legend())
    width = output_width()
    console = Console(width=width or 80, highlight=False, soft_wrap=width is None)
    for shown in texts:
        console.print()
        console.print(shown)


def _datasets(loaded: LoadedConfig, data: Corpora) -> Iterator[tuple[DatasetEntry, TokenDataset]]:
    yield from zip(loaded.config.datasets, data.train.corpus.datasets, strict=True)
    if loaded.config.validation_datasets and data.validation is not None:
        yield from zip(loaded.config.validation_datasets, data.validation.corpus.datasets, strict=True)


def _summary(loaded: LoadedConfig, data: Corpora) -> Iterator[str]:
    for entry, dataset in _datasets(loaded, data):
        yield f"{entry.path} ({entry.type})"
        yield from _dataset(dataset)
        yield ""
    length = loaded.config.sequence_len
    for name, rows in parts(data).items():
        padding = 1 - rows.n_tokens / (rows.n_rows * length)
        of_part = f"{counted(rows.n_tokens, 'token')} in {counted(rows.n_rows, 'row')} of {length:,}"
        yield f"{name:<10}{of_part}, {padding:.1%} padding"


def _dataset(dataset: TokenDataset) -> Iterator[str]:
    shortest, median, most, longest = lengths(dataset)
    of_groups = f"   in groups of {dataset.group}" if dataset.group > 1 else ""
    yield f"  documents {dataset.n_docs:>15,}{of_groups}"
    for name, numbers in dataset.columns.items():
        yield f"  {name:<10}{numbers.min():>15,.4g}   to {numbers.max():,.4g}, a column"
    yield f"  tokens    {dataset.n_tokens:>15,}"
    yield f"  trained   {dataset.n_trained:>15,}   {dataset.n_trained / dataset.n_tokens:.1%} of the tokens"
    yield f"  lengths   {shortest:,} to {longest:,} tokens, median {median:,}, 99 % up to {most:,}"
    if dataset.path is not None:
        yield f"  cache     {dataset.path}"


def _legend() -> str:
    if sys.stdout.isatty():
        return f"{paint('trained', 'green')}, {paint('masked', 'dim')}"
    return "[[trained]], masked"


def _document(data: Corpora, number: int, where: str, entry: DatasetEntry, start: int, stop: int) -> Text:
    every = whole(data, number)
    part = f" of {every:,}" if stop - start < every else ""
    shown = Text(f"{where} ({entry.type}), document {number:,}, {stop - start:,}{part} tokens\n", style="bold")
    return shown.append(_tokens(read(data, start, stop), data.tokenizer, _SHOWN_TOKENS))


def _tokens(document: Encoded, tokenizer: RowTokenizer, most: int | None = None) -> Text:
    """Return the text of a document, with at most `most` tokens."""
    plain, shown = not sys.stdout.isatty(), Text()
    for text, is_trained in runs(Encoded(document.tokens[:most], document.trained[:most]), tokenizer):
        visible = _visible(text)
        marked = f"[[{visible}]]" if plain and is_trained else visible
        shown.append(marked, style="not bold green" if is_trained else "not bold dim")
    if most is not None and most < len(document.tokens):
        shown.append(f" ... {len(document.tokens) - most:,} more tokens", style="not bold cyan")
    return shown


def _visible(text: str) -> str:
    """Mark line breaks and escape control characters, which would otherwise control the terminal."""
    return "".join(
        "⏎\n" if char == "\n" else char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )
