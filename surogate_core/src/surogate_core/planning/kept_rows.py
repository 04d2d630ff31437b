"""Settings that keep the rows of an optimizer step on another number of ranks."""

from __future__ import annotations


def keep_rows(rows_per_step: int, ranks: int, batch_size: int) -> tuple[int, int] | None:
    """Return the micro-batch and accumulation with which `ranks` ranks take `rows_per_step` rows in an optimizer step.

    The micro-batch is the largest one that divides the rows of a rank and is at most `batch_size`. None: the rows
    cannot be divided evenly among the ranks.
    """
    if rows_per_step % ranks:
        return None
    rows = rows_per_step // ranks
    batch = max(size for size in range(1, min(batch_size, rows) + 1) if rows % size == 0)
    return batch, rows // batch


def kept_rows_text(rows_per_step: int, ranks: int, batch_size: int) -> str:
    """Return what to set so that an optimizer step keeps its rows on `ranks` ranks."""
    kept = keep_rows(rows_per_step, ranks, batch_size)
    if kept:
        batch, accumulation = kept
        return (
            f"set gradient_accumulation_steps: {accumulation} (and per_device_train_batch_size: {batch}) to keep the "
            f"{rows_per_step} rows of a step on {ranks} rank{'s' * (ranks > 1)}"
        )
    fewer = max(n for n in range(1, ranks) if rows_per_step % n == 0)
    more = next((n for n in range(ranks + 1, 8 * ranks) if rows_per_step % n == 0), None)
    return (
        f"the {rows_per_step} rows of a step cannot be divided evenly among {ranks} ranks, one on each GPU unless "
        f"ranks_per_gpu is set: use {fewer}" + (f" or {more}" if more else "")
    )
