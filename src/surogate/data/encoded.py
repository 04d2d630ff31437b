"""Checks of what a dataset type makes of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from surogate_core.api import DatasetFormatDef, Encoded
from surogate_core.errors import PluginError

from .row import Row
from .tokenizer import Tokenizer


def documents_of(format_def: DatasetFormatDef, result: Encoded | Sequence[Encoded], row: Row) -> Sequence[Encoded]:
    """Return the documents that `encode` made of a row. Raises PluginError if it made another number."""
    documents = [result] if isinstance(result, Encoded) else list(result)
    if len(documents) != format_def.group_size and not any(document.left_out for document in documents):
        raise _wrong_result(row, format_def, f"{len(documents)} documents; its group is {format_def.group_size}")
    return documents


def arrays_of(
    document: Encoded, row: Row, format_def: DatasetFormatDef, tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], Mapping[str, npt.NDArray[np.float32]]]:
    """Return tokens, mask and columns of a document. Raises PluginError if they do not fit together."""
    try:
        ids = np.asarray(document.tokens, np.int64)
        mask = np.asarray(document.trained, np.bool_)
        columns = {name: np.atleast_1d(np.asarray(v, np.float32)) for name, v in document.columns.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise _wrong_result(row, format_def, f"something other than tokens and mask entries ({error})") from error
    if ids.shape != mask.shape or ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        span = f" from {ids.min()} to {ids.max()}" if ids.size else ""
        found = f"{ids.size} tokens{span} and {mask.size} mask entries"
        raise _wrong_result(row, format_def, f"{found}; the vocabulary is {tokenizer.vocab_size}")
    if format_def.group_size > 1 and not mask[1:].any():
        raise _wrong_result(row, format_def, "a document without a trained token after its first in a group")
    counts = {column.name: (ids.size, f"{ids.size} tokens") for column in format_def.columns}
    counts |= {column.name: (1, "a document") for column in format_def.columns if column.per == "document"}
    for name in {**columns, **counts}:
        if name not in counts:
            raise _wrong_result(row, format_def, f"{name}, which DatasetFormatDef.columns does not declare")
        if name not in columns:
            raise _wrong_result(row, format_def, f"no {name}, which DatasetFormatDef.columns declares")
        count, of = counts[name]
        if columns[name].shape != (count,):
            shape = " x ".join(map(str, columns[name].shape))
            raise _wrong_result(row, format_def, f"{shape} numbers of {name} for {of}")
    if not all(np.isfinite(values).all() for values in columns.values()):
        raise _wrong_result(row, format_def, "a number in a column that is not finite")
    return ids, mask, columns


def _wrong_result(row: Row, format_def: DatasetFormatDef, what: str) -> PluginError:
    if format_def.origin is not None:
        return PluginError(f"{row.where}: {format_def.origin.failed('encode', f'returned {what}')}")
    return PluginError(f"{row.where}: dataset type {format_def.name!r} returned {what}. Report this to its authors.")
