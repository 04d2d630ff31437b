"""A check, on the run's own rows and weights, that packed documents do not affect each other.

It compares the loss of some packed rows with the loss of the same documents in a row each. The two are equal if, and in
practice only if, neither attention nor positions nor labels cross a document's border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import TYPE_CHECKING

import numpy as np

from surogate_core.api.models import Unit
from surogate_core.dtypes import DTYPES
from surogate_core.errors import ProgramError

from ..data.loader import eval_batches
from ..data.pack import PackedRows
from ..reporting.text import counted
from ..world.processes import Processes
from .sums import Sums, sum_losses

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker

DOCUMENTS = 16
"""About how many documents are compared. Each takes at most the forward pass of a row."""

LABEL_ERROR = 1
"""Rounding error of one label's loss, in eps of the loss: the same sums are split into other tiles."""

SUM_ERROR = 8
"""Rounding error of the sum over all labels, in eps of fp32."""


@dataclass(frozen=True)
class PackingCheck:
    """Mean losses of the same documents. `tolerance`: the largest difference that rounding explains."""

    packed: float
    alone: float
    labels: int
    documents: int
    rows: int
    tolerance: float

    def __str__(self) -> str:
        return (
            f"packing: {self.documents} documents have loss {self.packed:.4f} in "
            f"{counted(self.rows, 'row')}, {self.alone:.4f} alone"
        )


def check_packing(
    worker: AnyWorker,
    rows: PackedRows,
    batch_size: int,
    pad_id: int,
    dtypes: Sequence[str],
    processes: Processes,
    per: Unit = "token",
) -> PackingCheck | None:
    """Evaluate a few rows packed and unpacked. Return None if no row has two documents, or a loss is not finite.

    `dtypes`: those that the forward pass computes in. `per`: what the loss is a mean over. All `processes` of a run
    call this. Changes neither weights nor gradients. Raises ProgramError when the losses differ by more than rounding
    explains.
    """
    chosen = _some_packed_rows(rows)
    if not len(chosen):
        return None
    first, last = rows.row_offsets[chosen], rows.row_offsets[chosen + 1]
    pieces = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])

    def mean_loss(counts: np.ndarray) -> tuple[float, Sums]:
        """Return the mean loss of rows of `pieces` in order, `counts[i]` of them in row i."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        some = replace(rows, start=rows.start[pieces], stop=rows.stop[pieces], row_offsets=offsets)
        world = processes.world
        batches = eval_batches(some, batch_size, pad_id=pad_id, ranks=world.ranks, world_size=world.size)
        sums = sum_losses(worker, batches, processes, "the comparison of packed and unpacked rows")
        return sums.mean(sums.totals[0], per), sums

    packed, sums = mean_loss(last - first)
    alone, _ = mean_loss(np.ones_like(pieces))
    labels, units = sums.labels, sums.labels if per == "token" else sums.groups
    if not (labels and isfinite(packed) and isfinite(alone)):
        return None
    eps = max(DTYPES[dtype].eps for dtype in dtypes)
    # The errors of single labels have either sign and average out. Those of a group's labels add up in its loss, which
    # may be near 0 where its slope is not.
    of_unit, size = LABEL_ERROR * eps * sqrt(labels / units), max(abs(alone), 0.0 if per == "token" else 1.0)
    tolerance = size * (SUM_ERROR * DTYPES["fp32"].eps + of_unit / sqrt(units))
    check = PackingCheck(packed, alone, labels, len(pieces), len(chosen), tolerance)
    if not abs(packed - alone) <= tolerance:
        raise ProgramError(
            f"{check}: a difference of {abs(packed - alone):.2g}, more than rounding explains "
            f"({tolerance:.1g}). Documents in a row affect each other: a fault in attention or in the model's "
            "plugin. Until it is fixed, train with sample_packing: false."
        )
    return check


def _some_packed_rows(rows: PackedRows) -> np.ndarray:
    """Return rows of several documents, those with the fewest first, until they have about DOCUMENTS documents."""
    counts = np.diff(rows.row_offsets)
    several = np.flatnonzero(counts > 1)
    several = several[np.argsort(counts[several], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(counts[several]), DOCUMENTS)) + 1
    return np.sort(several[:enough])
