"""Batches of a run in a file, and a training from them by core alone: `python saved_batches.py FOLDER`.

Imports nothing of the program, so that it runs where `surogate-core` and its four requirements are installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from surogate_core import Definitions, train_from
from surogate_core.api import PrecisionRequest
from surogate_core.batch import MicroBatch, StepBatch

ARRAYS = ("tokens", "targets", "positions", "cu_seqlens")


def save(folder: Path, batches: Sequence[StepBatch]) -> None:
    counts = [
        [{name: value for name, value in asdict(micro).items() if name.startswith("n_")} for micro in batch.micro]
        for batch in batches
    ]
    steps = [{"tokens": batch.tokens, "valid_tokens": batch.valid_tokens, "epoch": batch.epoch} for batch in batches]
    (folder / "counts.json").write_text(json.dumps([counts, steps]))
    stacked = {name: np.array([[getattr(m, name) for m in batch.micro] for batch in batches]) for name in ARRAYS}
    np.savez(folder / "batches.npz", **stacked)


def load(folder: Path) -> list[StepBatch]:
    counts, steps = json.loads((folder / "counts.json").read_text())
    arrays = np.load(folder / "batches.npz")
    return [
        StepBatch([MicroBatch(**{n: arrays[n][i, j] for n in ARRAYS}, **c) for j, c in enumerate(counts[i])], **step)
        for i, step in enumerate(steps)
    ]


def train(folder: Path, row_length: int, learning_rate: float) -> tuple[list[float], dict[str, Any]]:
    """Return the losses, and the weights by name, of fp32 training with AdamW on the batches of a folder."""
    losses: list[float] = []
    definitions = Definitions(
        model=json.loads((folder / "config.json").read_text()),
        recipe="bf16",
        optimizer="adamw",
        precision=PrecisionRequest(model_dtype="fp32"),
        weight_decay=0.1,
        max_grad_norm=1.0,
        deterministic="true",
    )
    trained = train_from(
        definitions, load(folder), learning_rate, row_length=row_length, report=lambda step: losses.append(step.loss)
    )
    return losses, {name: tensor.numpy() for name, tensor in trained.weights.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    losses, weights = train(folder, int(sys.argv[2]), float(sys.argv[3]))
    np.savez(folder / "trained.npz", **weights)
    print(json.dumps(losses))
