"""Runs programs of losses of groups of documents on rows of 24 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.assembly.assembly import metrics_of

from .harness import PlannedModel


def step(
    model: PlannedModel,
    rows: list[list[list[int]]],
    program: str = "micro_first",
    *,
    units: int = 3,
    group: int = 2,
) -> dict[str, float]:
    """Run a program on rows of groups, and return the means of the figures over `units`, by name."""
    model.write(rows, 1.0)
    batch = model.assembly.batch
    assert batch.groups is not None and batch.group_scale is not None
    spans = []
    for number, row in enumerate(rows):
        at = 24 * number
        for document in row:
            spans.append((at, at + len(document)))
            at += len(document)
    groups = model.buffers.persistent(batch.groups)
    groups.zero_()
    groups[: len(spans) // group] = torch.tensor(spans, dtype=torch.int32).view(-1, group, 2)
    model.buffers.persistent(batch.group_scale).fill_(1 / units)
    model.executor.run(program)
    held = "evaluation" if program == "evaluate" else "step"
    loss, *figures = (model.buffers.persistent(getattr(f, held)).clone() for f in model.assembly.reported)
    scalars = [value.item() if value.ndim == 0 else value.numpy() for value in figures]
    return {"loss": float(loss), **metrics_of(model.assembly.reported, scalars)}


def gradients(model: PlannedModel) -> dict[str, Tensor]:
    declared = [v for v in model.assembly.declared if v.role == "grad"]
    return {v.name.removeprefix("grad."): model.buffers.persistent(v).clone() for v in declared}
