"""Tokens of a run's data whose rows in the frozen embedding or head look as if nothing had trained them.

A tokenizer may have tokens that the model was never trained on: added ones in the padded vocabulary, or after
`resize_token_embeddings`. An adapter leaves their rows as they are, and then learns around them. No file says which
rows are trained, so this looks at the rows of the added tokens that the data has. One counts as untrained if

- it is zero, or its norm is below TINY of the median;
- another row has the same bits;
- it is the mean of all rows up to NEAR of their median distance from it, as transformers makes new rows.

A row that was drawn at random as the weights before training were is not recognised: it looks like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..data.checks import COUNTED_LABELS
from ..runs.unstored import param_kinds
from .stored_weights import locate
from .weights_file import LOADABLE, opened

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from surogate_core.api import AdapterDef
    from surogate_core.assembly.assembly import Assembly

    from ..data.corpora import Corpora
    from ..data.pack import PackedRows
    from ..runs.run import Run

TINY = 1e-3
NEAR = 1e-2
_READ_ROWS = 8192
_READ_TOKENS = 1 << 20
_MOST_NAMES = 5  # tokens that a notice spells out


def untrained_tokens(run: Run, assembly: Assembly, data: Corpora) -> str | None:
    """Return a line on the added tokens of the data whose rows are frozen and look untrained; None if there is none."""
    if run.adapter is None or run.config.from_scratch:
        return None
    trained, kinds = {value.name for value in assembly.trainable}, param_kinds(run, assembly)
    tensors = [
        m.tensors[0].name
        for m in assembly.weights
        if m.param not in trained and kinds.get(m.param) in ("embedding", "head") and len(m.tensors) == 1
    ]
    counts = token_counts(data.train, data.tokenizer.added_ids) if tensors else {}
    found: dict[int, list[str]] = {}
    for name in tensors:
        for token in untrained_rows(run.model_dir, name, sorted(counts)):
            found.setdefault(token, []).append(name)
    return _line(run.adapter[0], {data.tokenizer.decode([token]): counts[token] for token in found}, found)


def _line(adapter: AdapterDef, counts: dict[str, int], found: dict[int, list[str]]) -> str | None:
    if not found:
        return None
    named = ", ".join(f"{text} ({count:,} times)" for text, count in [*counts.items()][:_MOST_NAMES])
    more = f" and {len(counts) - _MOST_NAMES} more" if len(counts) > _MOST_NAMES else ""
    tensors = " and ".join(dict.fromkeys(name for names in found.values() for name in names))
    remedy = f"Set {adapter.trains_tokens}" if adapter.trains_tokens else "Train all weights"
    rows = "its row" if len(found) == 1 else "their rows"
    return (
        f"model: the data has {named}{more}, and nothing seems to have trained {rows} of {tensors}, "
        f"which the adapter leaves frozen. {remedy}, or write the data with tokens that the model knows."
    )


def token_counts(rows: PackedRows, tokens: Sequence[int]) -> dict[int, int]:
    """Return how often each of `tokens` is in rows, as far as it is; over at most about COUNTED_LABELS tokens."""
    counts = np.zeros(max(tokens, default=-1) + 1, np.int64)
    stops = np.cumsum(rows.stop - rows.start)
    first = 0
    while first < len(stops) and len(counts):
        seen = int(stops[first - 1]) if first else 0
        if seen > COUNTED_LABELS:
            break
        last = max(first + 1, int(np.searchsorted(stops, seen + _READ_TOKENS)))
        spans = zip(rows.start[first:last], rows.stop[first:last], strict=True)
        held, _ = rows.corpus.read(np.concatenate([np.arange(start, stop) for start, stop in spans]))
        counts += np.bincount(held[held < len(counts)], minlength=len(counts))
        first = last
    return {token: int(counts[token]) for token in tokens if counts[token]}


def untrained_rows(model_dir: Path, name: str, rows: Sequence[int]) -> list[int]:
    """Return those of `rows` of a checkpoint's matrix that look untrained. It is read once, piece by piece."""
    import torch

    path = next((path for path, names in locate(model_dir).items() if name in names), None)
    if path is None or not rows:
        return []
    with opened(path) as file:
        stored = file.get_slice(name)
        n_rows, width = stored.get_shape()
        wanted = [row for row in rows if row < n_rows]
        if stored.get_dtype() not in LOADABLE or not wanted:
            return []
        own = torch.stack([stored[row : row + 1][0] for row in wanted])
        total, twins, some = torch.zeros(width, dtype=torch.float64), torch.zeros(len(wanted), dtype=torch.int64), []
        for start in range(0, n_rows, _READ_ROWS):
            piece = stored[start : start + _READ_ROWS]
            total += piece.float().sum(0)
            twins += _equal_rows(piece, own)
            some.append(piece[:: max(1, n_rows // _READ_ROWS)].float())
    mean, sample, own = (total / n_rows).float(), torch.cat(some), own.float()
    tiny = own.norm(dim=1) <= TINY * sample.norm(dim=1).median()
    near = (own - mean).norm(dim=1) <= NEAR * (sample - mean).norm(dim=1).median()
    return [row for row, bad in zip(wanted, (tiny | near | (twins > 1)).tolist(), strict=True) if bad]


def _equal_rows(piece: Tensor, own: Tensor) -> Tensor:
    """Return how many rows of `piece` each row of `own` equals."""
    import torch

    wanted, found = _keys(own), _keys(piece)
    alike = piece[torch.isin(found, wanted)]
    return torch.stack([(alike == row).all(1).sum() for row in own])


def _keys(rows: Tensor) -> Tensor:
    """Return a number of the first columns of each row, which few rows share that are not equal."""
    total = rows[:, 0].double()
    for column in range(1, min(4, rows.shape[1])):
        total = total * 3.1 + rows[:, column]
    return total
