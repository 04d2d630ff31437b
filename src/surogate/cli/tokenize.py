"""`surogate tokenize`: counts of a run's tokens, some documents, or one row of the data."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
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
from ..data.left_out import LeftOut, left_out
from ..data.pack import PackedRows
from ..machine.progress import print_notice
from ..report.page import refuse_other
from ..report.reports import data_page
from .assumed_verb import assumed_verb
from .json_output import print_json
from .options import RunArguments
from .render import output_width, paint
from .written_page import print_written

Found = tuple[int, str, DatasetEntry, int, int]
"""A document of the training data: its number, the place of its row, its entry, and where it starts and stops."""

LENGTHS: Final = ("shortest", "median", "percentile_99", "longest")
_BINS: Final = 28
_SHOWN_ROWS: Final = 12
"""Rows whose packing is told."""
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
    documents = list(_documents(loaded, data)) if debug or html else []
    if html is not None:
        name, folder = loaded.config.resolved_run_name, arguments.config.parent
        print_written(html, data_page(to_json(loaded, data, documents), name, folder, notices, html))
    if as_json:
        print_json(to_json(loaded, data, documents if debug else ()))
        return 0
    if assumed := assumed_verb(loaded, arguments):
        print(assumed)
    print("\n".join(_summary(loaded, data)))
    if debug:
        print()
        _print(_document(data, *found) for found in documents)
    return 0


def show_row(arguments: RunArguments, place: str, *, as_json: bool = False) -> int:
    """Tokenize one row of the data and print it (`run.tokenize_row`)."""
    row = run.tokenize_row(run.load(arguments.config, arguments.overrides, arguments.mode), place)
    for line in row.left_out:
        print_notice(f"left out: {line}")
    if as_json:
        documents = [_pieces(document, row.tokenizer) for document in row.documents]
        print_json({"row": row.where, "type": row.type, "left_out": row.left_out, "documents": documents})
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


def _print(parts: Iterable[Text]) -> None:
    print(_legend())
    width = output_width()
    console = Console(width=width or 80, highlight=False, soft_wrap=width is None)
    for shown in parts:
        console.print()
        console.print(shown)


def to_json(loaded: LoadedConfig, data: Corpora, documents: Sequence[Found]) -> dict[str, Any]:
    """Return counts and documents as data: the contract of `surogate tokenize --json`."""
    return {
        "defaults": loaded.mode,
        "datasets": [
            {
                "path": entry.path,
                "type": entry.type,
                "documents": dataset.n_docs,
                "tokens": dataset.n_tokens,
                "trained": dataset.n_trained,
                "group": dataset.group,
                "columns": {name: [float(n.min()), float(n.max())] for name, n in dataset.columns.items()},
                "lengths": dict(zip(LENGTHS, _lengths(dataset), strict=True)),
                "histogram": _histogram(dataset),
                "left_out": [asdict(one) for one in missing],
                "cache": dataset.path,
            }
            for entry, dataset, missing in _with_left_out(loaded, data)
        ],
        "rows": {
            name: {
                "rows": found.n_rows,
                "tokens": found.n_tokens,
                "sequence_len": found.sequence_len,
                "padding": 1 - found.n_tokens / (found.n_rows * found.sequence_len),
                "documents_per_row": len(found.start) * found.corpus.group / found.n_rows,
                "first_rows": _first_rows(found),
            }
            for name, found in _parts(data).items()
        },
        "documents": [
            {"document": number, "row": where, "path": entry.path, "type": entry.type}
            | {"whole_tokens": _whole(data, number)}
            | _pieces(_read(data, *span), data.tokenizer)
            for number, where, entry, *span in documents
        ],
    }


def _read(data: Corpora, start: int, stop: int) -> Encoded:
    """Return the training data at positions `start` to `stop`."""
    return Encoded(*(part.tolist() for part in data.train.corpus.read(np.arange(start, stop))))


def _pieces(document: Encoded, tokenizer: RowTokenizer) -> dict[str, Any]:
    """Return the text of a document in pieces that are trained or masked."""
    pieces = [{"text": text, "trained": trained} for text, trained in runs(document, tokenizer)]
    return {"tokens": len(document.tokens), "pieces": pieces}


def _datasets(loaded: LoadedConfig, data: Corpora) -> Iterator[tuple[DatasetEntry, TokenDataset]]:
    yield from zip(loaded.config.datasets, data.train.corpus.datasets, strict=True)
    if loaded.config.validation_datasets and data.validation is not None:
        yield from zip(loaded.config.validation_datasets, data.validation.corpus.datasets, strict=True)


def _with_left_out(loaded: LoadedConfig, data: Corpora) -> Iterator[tuple[DatasetEntry, TokenDataset, list[LeftOut]]]:
    """Yield each entry with its tokens and what no row of the run has of them."""
    corpus = data.train.corpus
    rows = [part for part in _parts(data).values() if part.corpus is corpus]
    for entry, dataset, base in zip(loaded.config.datasets, corpus.datasets, corpus.bases[:-1].tolist(), strict=True):
        yield entry, dataset, left_out(dataset, base, rows, entry.weight)
    if loaded.config.validation_datasets and data.validation is not None:
        corpus = data.validation.corpus
        entries = zip(loaded.config.validation_datasets, corpus.datasets, corpus.bases[:-1].tolist(), strict=True)
        for entry, dataset, base in entries:
            yield entry, dataset, left_out(dataset, base, [data.validation], None)


def _histogram(dataset: TokenDataset) -> list[list[int]]:
    """Return [least, most, count] of ranges of lengths in tokens, each a constant factor wide."""
    lengths = np.diff(dataset.offsets[:: dataset.group])
    edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, _BINS + 1).round().astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return [[int(a), int(b) - 1, int(n)] for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def _first_rows(rows: PackedRows) -> list[list[list[int]]]:
    """Return [tokens, trained tokens] of each piece of the first rows, as they are packed."""
    found = []
    for row in range(min(rows.n_rows, _SHOWN_ROWS)):
        pieces = range(rows.row_offsets[row], rows.row_offsets[row + 1])
        spans = [np.arange(rows.start[piece], rows.stop[piece]) for piece in pieces]
        found.append([[len(span), int(rows.corpus.read(span)[1].sum())] for span in spans])
    return found


def _parts(data: Corpora) -> dict[str, PackedRows]:
    return {"train": data.train} | ({"validate": data.validation} if data.validation else {})


def _summary(loaded: LoadedConfig, data: Corpora) -> Iterator[str]:
    for entry, dataset in _datasets(loaded, data):
        yield f"{entry.path} ({entry.type})"
        yield from _dataset(dataset)
        yield ""
    length = loaded.config.sequence_len
    for name, rows in _parts(data).items():
        padding = 1 - rows.n_tokens / (rows.n_rows * length)
        yield f"{name:<10}{rows.n_tokens:,} tokens in {rows.n_rows:,} rows of {length:,}, {padding:.1%} padding"


def _lengths(dataset: TokenDataset) -> list[int]:
    found: list[int] = np.percentile(np.diff(dataset.offsets), [0, 50, 99, 100], method="nearest").tolist()
    return found


def _dataset(dataset: TokenDataset) -> Iterator[str]:
    shortest, median, most, longest = _lengths(dataset)
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


def _documents(loaded: LoadedConfig, data: Corpora) -> Iterator[Found]:
    """Yield the shortest, the median and the longest document of each entry, as the rows of the run have them.

    A document that is left out or held out is in none; of one that is cut, a row has a part.
    """
    corpus = data.train.corpus
    _, starts, stops = data.train.documents(np.arange(data.train.n_rows))
    starts, first = np.unique(starts, return_index=True)
    stops = stops[first]
    bases = zip(corpus.bases, corpus.bases[1:], corpus.document_bases, strict=False)
    for entry, dataset, (base, end, before) in zip(loaded.config.datasets, corpus.datasets, bases, strict=True):
        own = slice(*np.searchsorted(starts, [base, end]))
        by_length = np.argsort(stops[own] - starts[own], kind="stable")
        for at in dict.fromkeys(by_length[[0, len(by_length) // 2, -1]].tolist() if len(by_length) else ()):
            start, stop = int(starts[own][at]), int(stops[own][at])
            number = int(corpus.documents(np.array([start]))[0, 0])
            yield number + 1, dataset.where(number - int(before)), entry, start, stop


def _whole(data: Corpora, number: int) -> int:
    """Return the tokens of a document, of which a row may have a part."""
    start, stop = data.train.corpus.bounds[number - 1 : number + 1].tolist()
    return int(stop - start)


def _document(data: Corpora, number: int, where: str, entry: DatasetEntry, start: int, stop: int) -> Text:
    whole = _whole(data, number)
    part = f" of {whole:,}" if stop - start < whole else ""
    shown = Text(f"{where} ({entry.type}), document {number:,}, {stop - start:,}{part} tokens\n", style="bold")
    return shown.append(_tokens(_read(data, start, stop), data.tokenizer, _SHOWN_TOKENS))


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
