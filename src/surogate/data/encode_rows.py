"""Rows as tokens, by their dataset type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from surogate_core.api import DatasetFormatDef, Encoded, Omission
from surogate_core.errors import ConfigError, PluginError

from .chat.media import MEDIA_COLUMNS
from .chat.row_tokenizer import RowTokenizer
from .chat.template import RenderEnded, end_renderings_with
from .divide import Divide, whole
from .encoded import arrays_of, documents_of
from .row import Row
from .skipped_rows import cause


@dataclass(frozen=True)
class EncodedRows:
    """Tokenised rows, their documents concatenated. empty: rows without tokens that no omission names.

    places: as in `TokenDataset`. bad: the errors of rows that are refused, unless these are skipped. first, last: those
    of `Row`; a part of a row is alone.
    """

    tokens: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[np.float32]]
    rows: int
    empty: int
    n_bytes: int
    omissions: list[tuple[Omission, str]]
    bad: list[ConfigError]
    first: bool = True
    last: bool = True


def divide_of(format_def: DatasetFormatDef, tokenizer: RowTokenizer) -> Divide:
    """Return how a text that is a row is read for the type: in parts, if it and the tokenizer can encode these."""
    in_parts = format_def.encode_part and not format_def.columns and format_def.group_size == 1
    return tokenizer.pieces if in_parts else whole


def encode_rows(
    rows: Sequence[Row],
    columns: Sequence[str],
    format_def: DatasetFormatDef,
    options: BaseModel,
    tokenizer: RowTokenizer,
    skip_bad: bool,
    ended: Event | None = None,
) -> EncodedRows:
    """Return the documents of rows that have `columns`. skip_bad: leave out rows that the type refuses.

    ended: set if nobody waits for the result any more.
    """
    tokens: list[npt.NDArray[np.uint32]] = []
    trained: list[npt.NDArray[np.bool_]] = []
    numbers: dict[str, list[npt.NDArray[np.float32]]] = {column.name: [] for column in format_def.columns}
    omitted: list[tuple[Omission, str]] = []
    bad: list[ConfigError] = []
    places: list[tuple[int, int]] = []
    n_bytes = empty = 0
    end_renderings_with(ended)
    for row in rows:
        if ended is not None and ended.is_set():
            raise CancelledError
        try:
            documents = documents_of(format_def, _encoded(row, format_def, options, tokenizer), row)
        except RenderEnded as error:
            raise RenderEnded(f"{row.where}: {error}") from error
        except ConfigError as error:
            if not row.first:  # what was before is in the tokens
                raise ConfigError(f"{row.where}: {error}") from error
            if not skip_bad:
                bad.append(ConfigError(f"{row.where}: {error}"))
                continue
            documents = [Encoded((), (), left_out=cause(error, [*columns, *MEDIA_COLUMNS]))]
        except PluginError as error:
            raise PluginError(f"{row.where}: {error}") from error.__cause__
        except Exception as error:  # an error in a format of core
            error.add_note(f"while encoding {row.where}")
            raise
        # of a row that is left out, only that
        out = next((document.left_out for document in documents if document.left_out), "")
        found = [omission for document in documents for omission in document.omissions]
        omitted += [(omission, row.where) for omission in ([Omission("", "rows", out)] if out else found)]
        if row.is_part and not out:
            places.append((row.file, row.number))  # also if it has no tokens: other parts may have
        if out or not any(len(document.tokens) for document in documents):
            empty += not out and not row.is_part
            continue
        for document in documents:
            ids, mask, found_numbers = arrays_of(document, row, format_def, tokenizer)
            tokens.append(ids.astype(np.uint32))
            trained.append(mask)
            if not row.is_part:
                places.append((row.file, row.number))
            for name, values in found_numbers.items():
                numbers[name].append(values)
        n_bytes += sum(len(text.encode("utf-8", "replace")) for text in texts_of(row.values, columns))
    return EncodedRows(
        tokens=np.concatenate(tokens) if tokens else np.zeros(0, np.uint32),
        trained=np.concatenate(trained) if trained else np.zeros(0, np.bool_),
        lengths=np.fromiter(map(len, tokens), np.int64, len(tokens)),
        places=np.array(places, np.int64),
        columns={name: np.concatenate([np.zeros(0, np.float32), *parts]) for name, parts in numbers.items()},
        rows=sum(row.last for row in rows),
        empty=empty,
        n_bytes=n_bytes,
        omissions=omitted,
        bad=bad,
        first=rows[0].first,
        last=rows[-1].last,
    )


def _encoded(
    row: Row, format_def: DatasetFormatDef, options: BaseModel, tokenizer: RowTokenizer
) -> Encoded | Sequence[Encoded]:
    if row.is_part and format_def.encode_part:
        return format_def.encode_part(row.values, tokenizer, options, row.first, row.last)
    return format_def.encode(row.values, tokenizer, options)


def texts_of(values: Mapping[str, Any], columns: Sequence[str]) -> Iterator[str]:
    return (value for value in (values.get(column) for column in columns) if isinstance(value, str))
