"""`reference: cached`: numbers of all documents by the model before its first step, kept beside the cached tokens.

A file is `references/COLUMN.KEY` in the root of the token caches: XXH3 (128 bits) of what follows, and float32 numbers.
0.1.0 and 0.2.0 kept the numbers alone, in the folder of the tokens. They are read as well.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from surogate_core.errors import ConfigError
from surogate_core.runtime.team import AnyWorker

from ..checkpoints.base import weights_identity
from ..checkpoints.saved_run import SavedRun
from ..data.loader import micro_batch
from ..data.old_caches import caches_before
from ..data.pack import PackedRows
from ..data.row_hashes import content_hash
from ..data.tokenize import Notice, cache_error
from ..machine.replaced_file import replaced
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
        key, numbers = _key(saved, rows, content_hash(rows)), np.zeros(documents.shape, np.float32)
        path = tokens.parent / "references" / f"{column.name}.{key}"
        kept = _kept(path, saved, rows, numbers.nbytes, begun, notice) if world.writer else None
        found = processes.share(kept is not None, "the reference")
        if kept is not None:
            numbers = np.frombuffer(kept, np.float32).reshape(numbers.shape)
        elif not found and begun:
            raise ConfigError(
                f"reference: cached: {path} is gone or damaged, and the model has been trained since. Copy it from "
                "where it is whole, or start anew."
            )
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
                path.parent.mkdir(exist_ok=True)
                with replaced(path) as fresh:
                    fresh.write_bytes(xxh3_128(numbers.tobytes()).digest() + numbers.tobytes())
            except OSError as error:
                raise cache_error(error, path.parent) from error


def _kept(path: Path, saved: SavedRun, rows: PackedRows, size: int, begun: bool, notice: Notice) -> bytes | None:
    """Return the numbers in the file, of `size` bytes, or in that of an earlier version if the run has `begun`."""
    if path.is_file():
        content = path.read_bytes()
        if len(content) == 16 + size and xxh3_128(content[16:]).digest() == content[:16]:
            return content[16:]
        notice(f"reference: {path} is damaged: its content differs from what was written (hash mismatch)")
    for caches in caches_before(rows) if begun else ():
        for old in path.parent.parent.glob(f"*/{path.name.split('.')[0]}.{_key(saved, rows, caches)}"):
            if old.stat().st_size == size:
                return old.read_bytes()
    return None


def _key(saved: SavedRun, rows: PackedRows, of: str) -> str:
    """Return a hash of what decides the numbers. of: the hash of the rows, before 0.3.0 of their caches."""
    run, config, inputs = saved.run, saved.run.config, saved.plan.inputs
    adapter = sorted(Path(config.adapter_path).glob("*.safetensors")) if config.adapter_path else []
    settings = [
        of,
        run.model_config,
        config.train_seed if config.from_scratch else weights_identity(run.model_dir),
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in adapter],
        [config.recipe, run.loaded.recipe_options, run.loaded.adapters, inputs.precision],
        *([run.model_options] if type(run.model_options).model_fields else []),
        run.weight_format and [run.weight_format[0].name, run.weight_format[1], sorted(inputs.stored_kinds)],
    ]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
