"""Hugging Face checkpoints: planned buffers to a directory that transformers loads; merged models.

Weights are written one tensor at a time, so that no second copy of the model is ever in memory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import DTYPES, HFTensor, WeightMap
from surogate_core.errors import ConfigError, ProgramError
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.pieces import Pieces

from ..hub.config_json import read_json
from ..hub.files import PROCESSOR_FILES, SAVED_TOKENIZER_FILES, TEMPLATE_DIRECTORY
from ..hub.generation_config import GENERATION_CONFIG, stop_ids, with_stops
from ..machine.progress import Progress
from ..reporting.text import names_text
from ..runs.published_form import unquantized
from .folders import SAVING, made, stopping_when_disk_refuses, sync, sync_tree, write_moved
from .formed_weights import FormedWeights
from .model_tensors import model_tensors
from .rewriting import write_weights
from .saved_tensors import SavedTensor
from .stored_weights import INDEX, WEIGHTS, rows_of
from .tensor_file import MAX_SHARD_BYTES, Stored, Writable, WritableT, nbytes, split_into_shards, write_safetensors
from .weights_file import AGAIN

CONFIG = "config.json"

# -------------------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True, kw_only=True)
class ModelExport:
    """A model to be written as a Hugging Face checkpoint.

    weights          the checkpoint's tensors of each param
    params           what this process has of the params, by name
    config           the model's parsed config.json
    source_dir       the folder that tokenizer, chat template and generation config are copied from; None: none
    dtype            of the model, which its config.json names: fp32 or bf16
    other_dtypes     dtypes of the params that have another, by name: each is stored as it was trained
    kept             tensors of the base that the model has as they are
    turn_ends        tokens that end trained turns, at which the model's generation config stops, too
    max_shard_bytes  largest size of a weights file; larger models have several and an index, a larger tensor its own
    """

    weights: Sequence[WeightMap]
    params: Mapping[str, Pieces]
    config: Mapping[str, Any]
    source_dir: Path | None
    dtype: str
    other_dtypes: Mapping[str, str] = field(default_factory=dict)
    kept: Sequence[SavedTensor] = ()
    turn_ends: Sequence[int] = ()
    max_shard_bytes: int = MAX_SHARD_BYTES


def write_model(directory: Path, model: ModelExport) -> dict[str, str]:
    """Write a model into an empty directory, as `AutoModelForCausalLM.from_pretrained` loads it.

    The inverse of `StoredWeights.load`. Return the hashes of the weights, {file name: hash}. For use inside
    `save_checkpoint`: neither atomic nor synced to the disk.
    """
    every: list[Writable] = [*stored_tensors(model), *model.kept]
    shards = shards_of(every, model.max_shard_bytes)
    hashes = {file: write_safetensors(directory / file, shard) for file, shard in shards.items()}
    if len(shards) > 1:
        write_json(directory / INDEX, weight_index(shards))
    write_rest(directory, model)
    return hashes


def write_rest(directory: Path, model: ModelExport) -> None:
    """Write the files of a model besides its weights."""
    _write_companions(directory, model.config, model.source_dir, model.turn_ends)
    dtype = DTYPES[model.dtype].torch_name  # under both names in use; references to code are left out
    kept = {key: value for key, value in model.config.items() if key not in ("auto_map", "_name_or_path")}
    write_json(directory / CONFIG, {**kept, "dtype": dtype, "torch_dtype": dtype})


def save_model(out_dir: Path, model: ModelExport) -> None:
    """Write a model into a directory that may hold other files and an older model, atomically.

    The files are written and synced in a hidden directory inside `out_dir`. Then the older config.json is removed, the
    new files are moved, remaining older weights are removed, and the new config.json is moved last. So a directory with
    a config.json holds one complete model, whenever the process is killed. Raises RunStopped when the disk is full or
    refuses.
    """
    save_files(out_dir, lambda fresh: write_model(fresh, model), CONFIG, safe_in=out_dir)


def save_files(
    out_dir: Path,
    write: Callable[[Path], object],
    last: str,
    *,
    make_room: Callable[[], object] = lambda: None,
    safe_in: Path | None = None,
) -> None:
    """Have `write` fill a folder and move its files into `out_dir` as `save_model` does.

    `last`: pattern of the file that is moved last. `make_room` is called once all files are written, before the first
    is moved. `safe_in`: as for `stopping_when_disk_refuses`. If `write` fails, `out_dir` is as it was: absent if it was
    new.
    """
    with stopping_when_disk_refuses(out_dir, safe_in=safe_in), made(out_dir):
        leftovers = list(out_dir.glob(f"{SAVING}*"))  # they tell `make_room` what is no whole model
        with tempfile.TemporaryDirectory(dir=out_dir, prefix=SAVING) as name:
            fresh = Path(name)
            write(fresh)
            sync_tree(fresh)
            make_room()
            names = {path.name for path in fresh.iterdir()}
            final = max(path.name for path in fresh.glob(last))
            write_moved(fresh, final)
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
            _move_in(fresh, out_dir, names, final)


def saved_dtype(model: ModelExport, param: str) -> torch.dtype:
    """Return the dtype in which a param is stored. Raises ProgramError if a checkpoint cannot have it."""
    dtype = model.other_dtypes.get(param, model.dtype)
    if not DTYPES[dtype].has_grad:
        raise ProgramError(f"{param} is {dtype}: checkpoints hold weights in floating point, such as fp32 and bf16")
    return TORCH_DTYPES[dtype]


def stored_tensors(model: ModelExport) -> Iterator[Stored]:
    """Yield what this process has of the checkpoint's tensors."""
    for tensor, held in held_rows(model):
        yield replace(held, moved=tensor if tensor.layout else None)


def held_rows(model: ModelExport) -> Iterator[tuple[HFTensor, Stored]]:
    """Yield each of the checkpoint's tensors with what this process has of its rows in the param."""
    for m in (m for m in model.weights if m.param in model.params):
        for tensor, row in rows_of(m):
            elements = model.params[m.param].rows(row, tensor.rows)
            yield tensor, Stored(tensor.name, elements, saved_dtype(model, m.param))


def shards_of(tensors: Sequence[WritableT], max_shard_bytes: int) -> dict[str, list[WritableT]]:
    """Return the files of a checkpoint's weights: {name: tensors}."""
    shards = split_into_shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def weight_index(shards: Mapping[str, Sequence[Writable]]) -> dict[str, Any]:
    """Return the content of the index of these files."""
    tensors = [tensor for shard in shards.values() for tensor in shard]
    total = {"total_parameters": sum(t.count for t in tensors), "total_size": sum(map(nbytes, tensors))}
    weight_map = {tensor.name: file for file, shard in shards.items() for tensor in shard}
    return {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}


def _write_companions(
    directory: Path, config: Mapping[str, Any], source_dir: Path | None, turn_ends: Sequence[int] = ()
) -> None:
    written = directory / GENERATION_CONFIG
    if source_dir is not None:
        copy_tokenizer(source_dir, directory)
        if (source_dir / GENERATION_CONFIG).is_file():
            shutil.copyfile(source_dir / GENERATION_CONFIG, written)
    if not written.exists():
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        write_json(written, {"_from_model_config": True, **ids})
    if turn_ends:
        write_stops(written, turn_ends, source_dir)


def write_stops(path: Path, turn_ends: Sequence[int], source_dir: Path | None) -> None:
    """Let a generation_config.json stop at the tokens `turn_ends`, too. It is left as it is if it does."""
    given = read_json(path, AGAIN)
    content = with_stops(given, turn_ends, source_dir)
    if content != given:
        write_json(path, content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a model."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _move_in(fresh: Path, out_dir: Path, new: set[str], last: str) -> None:
    """Move the files in the order of `save_model`. Sync in between, because renames may reach the disk in any order."""
    (out_dir / last).unlink(missing_ok=True)
    sync(out_dir)
    for name in sorted(new - {last}):
        (fresh / name).replace(out_dir / name)
    for path in (*out_dir.glob("model*.safetensors"), out_dir / INDEX):
        if path.name not in new:
            path.unlink(missing_ok=True)
    sync(out_dir)
    (fresh / last).replace(out_dir / last)
    sync(out_dir)


# --------------------------------------------------------------------------------------------------------------- merge


def write_merged(
    directory: Path,
    base_dir: Path,
    changes: Mapping[str, Callable[[Tensor], Tensor]],
    may_lack: Sequence[str] = (),
    adapter_dir: Path | None = None,
    formed: FormedWeights | None = None,
    dtype: str = "bf16",
    changed_in: str | None = None,
) -> None:
    """Write the checkpoint in `base_dir` with some of its tensors changed: same files, order and dtypes.

    It stops at the tokens at which the generation config in `adapter_dir` does, too.

    `changes`: {tensor: function of its old value}. `may_lack`: tensors of `changes` that are skipped if the base lacks
    them. `formed`: the weights that the checkpoint holds in a checkpoint form, which are read in `dtype`: the model
    that is written has none. `changed_in`: the dtype of changed tensors, if not their own. One tensor at a time is in
    memory. Raises ConfigError for any other changed tensor that the base lacks, or that is quantized otherwise. For use
    inside `save_files`.
    """
    with model_tensors(base_dir, changes, formed, dtype, changed_in) as tensors:
        refuse_absent(base_dir, changes.keys() - set(may_lack), tensors)
        with Progress(f"{base_dir}: rewriting", "tensors", len(tensors)) as progress:
            write_weights(directory, tensors, progress=progress)
    write_files_beside(directory, base_dir, adapter_dir, None if formed is None or formed.form is None else dtype)


def refuse_absent(base_dir: Path, changed: Collection[str], held: Collection[str]) -> None:
    """Raise ConfigError unless the base holds all tensors that an adapter changes."""
    if absent := sorted(set(changed) - set(held)):
        raise ConfigError(
            f"{base_dir}: has no {names_text(absent)}, which the adapter changes. Name the base that it was trained on."
        )


def write_files_beside(directory: Path, base_dir: Path, adapter_dir: Path | None, read_in: str | None) -> None:
    """Write the files of a model besides its weights into a folder: those of its base, and the stops of an adapter.

    read_in: the dtype that the weights of a base in a checkpoint form were read in; None: they are as they were.
    """
    config = read_json(base_dir / CONFIG, AGAIN)
    _write_companions(directory, config, base_dir)
    kept = {key: value for key, value in config.items() if key != "auto_map"}
    if read_in is not None:
        kept = {**unquantized(kept), "dtype": DTYPES[read_in].torch_name, "torch_dtype": DTYPES[read_in].torch_name}
    write_json(directory / CONFIG, kept)
    if adapter_dir is not None and (adapter_dir / GENERATION_CONFIG).is_file():
        write_stops(directory / GENERATION_CONFIG, stop_ids(adapter_dir), base_dir)


def copy_tokenizer(source_dir: Path, directory: Path) -> None:
    """Copy the tokenizer, its chat template and the processor of images, as far as the source has them."""
    for name in (*SAVED_TOKENIZER_FILES, *PROCESSOR_FILES):
        if (source_dir / name).is_file():
            shutil.copyfile(source_dir / name, directory / name)
    templates = sorted((source_dir / TEMPLATE_DIRECTORY).glob("*.jinja"))
    if templates:
        (directory / TEMPLATE_DIRECTORY).mkdir(exist_ok=True)
    for path in templates:
        shutil.copyfile(path, directory / TEMPLATE_DIRECTORY / path.name)
