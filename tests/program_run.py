"""A run of the program whose batches are recorded, to compare with a training by core alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import saved_batches
from end_to_end.product import MODEL_CONFIG, documents, write_jsonl, write_model
from safetensors.numpy import load_file

from surogate import run
from surogate.data.loader import Loader
from surogate_core.batch import StepBatch
from surogate_core.plugins.discovery import load_registry

LEARNING_RATE, ROW_LENGTH = 3e-3, 32


def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], dict[str, npt.NDArray[Any]]]:
    """Pre-train a tiny model and save the batches in `folder`. Return the losses, and the weights by name of the param.

    Rows are packed, with several documents and padding.
    """
    data = write_jsonl(folder / "rows.jsonl", documents(60))
    given: dict[int, StepBatch] = {}
    step = Loader.step

    def recorded(loader: Loader, index: int) -> StepBatch:
        given[index] = step(loader, index)
        return given[index]

    monkeypatch.setattr(Loader, "step", recorded)
    config = {
        "model": str(write_model(folder / "model")),
        "datasets": [{"path": str(data), "type": "text"}],
        "sequence_len": ROW_LENGTH,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "optimizer": "adamw",
        "model_dtype": "fp32",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "train_seed": 0,
        "deterministic": True,  # on a GPU: no selection of algorithms by time
        "verify_outputs": False,
        "from_scratch": True,
        "output_dir": str(folder / "out"),
    }
    done = run.train(run.load(config, mode="pt"), notice=lambda line: None)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    saved_batches.save(folder, [given[index] for index in range(done.steps)])
    records = map(json.loads, (folder / "out/metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["log"] == "step"]
    tensors, definition = load_file(folder / "out/model.safetensors"), load_registry().model_for(MODEL_CONFIG)
    maps = definition.weights(definition.dims(MODEL_CONFIG))
    return losses, {w.param: np.concatenate([tensors[held.name] for held in w.tensors]) for w in maps}
