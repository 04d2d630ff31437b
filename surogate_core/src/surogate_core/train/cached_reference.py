"""`reference: cached`: numbers of all documents by the model before its first step, kept with the cached tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from ..checkpoint.base import weights_identity
from ..checkpoint.saved_run import SavedRun, identity
from ..data.loader import micro_batch
from ..data.pack import PackedRows
from ..data.tokenize import Notice, cache_error
from ..errors import ConfigError
from ..machine.replaced_file import replaced
from ..runtime.team import AnyWorker
from ..world.processes import Processes
from .steps import Steps


def fill_reference(
    saved: SavedRun, steps: Steps, worker: AnyWorker, processes: Processes, begun: bool, notice: Notice
) -> None:
    """Fill `LossDef.cached_reference` of all documents, from a file or by evaluations. All processes call this.

    Raises ConfigError if a run that has `begun` lacks the file: its model is not that of before the first step.
    """
    column, world, size = saved.plan.inputs.loss.cached_reference, processes.world, steps.loader.batch_size
    for rows in filter(None, (steps.data.train, steps.data.validation)):
        documents, tokens = rows.corpus.documents(rows.start), rows.corpus.datasets[0].path
        assert column is not None and tokens is not None, "the loss reads the column of a dataset in the token cache"
        path, numbers = tokens / f"{column.name}.{_key(saved, rows)}", np.zeros(documents.shape, np.float32)
        found = processes.share(path.is_file() and path.stat().st_size == numbers.nbytes, "the reference")
        if found and world.writer:
            numbers = np.fromfile(path, np.float32).reshape(numbers.shape)
        elif not found and begun:
            raise ConfigError(f"reference: cached: {path} is gone, and the model has been trained since. Start anew.")
        elif not found:
            notice(f"reference: computing {numbers.size:,} documents, once; later runs use {path}")
        for at in range(0, 0 if found else rows.n_rows, size * world.size):
            processes.at(f"the reference, row {at:,} of {rows.n_rows:,}", 0)
            bounds = [np.minimum([at + rank * size, at + (rank + 1) * size], rows.n_rows) for rank in world.ranks]
            worker.evaluate(*(micro_batch(rows, np.arange(*both), size, steps.loader.pad_id) for both in bounds))
            for both, of_rank in zip(bounds, worker.cached(), strict=True):
                first, last = rows.row_offsets[both]
                numbers[first:last] = of_rank.numpy()[: last - first]
        numbers = np.array(processes.gather(numbers.tolist(), "the reference"), np.float32).sum(axis=0)  # others have 0
        rows.corpus.fill(column.name, documents, numbers)
        if world.writer and not found:
            try:
                with replaced(path) as fresh:
                    numbers.tofile(fresh)
            except OSError as error:
                raise cache_error(error, path.parent) from error


def _key(saved: SavedRun, rows: PackedRows) -> str:
    """Return a hash of what decides the numbers."""
    run, config, inputs = saved.run, saved.run.config, saved.plan.inputs
    adapter = sorted(Path(config.adapter_path).glob("*.safetensors")) if config.adapter_path else []
    settings = [
        identity(rows),
        run.model_config,
        config.train_seed if config.from_scratch else weights_identity(run.model_dir),
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in adapter],
        [config.recipe, run.loaded.recipe_options, run.loaded.adapters, inputs.precision],
        run.weight_format and [run.weight_format[0].name, run.weight_format[1], sorted(inputs.stored_kinds)],
    ]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
