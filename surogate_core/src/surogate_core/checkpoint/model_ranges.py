"""A model that several processes write to a checkpoint: each the ranges of the tensors that its ranks have.

Its folder holds the ranges, under the names and shapes of Hugging Face, and the index of the files to be made of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..api import WeightMap
from ..errors import ConfigError
from ..reporting.text import names_text
from ..runtime.pieces import Pieces
from .hf import ModelExport, saved_dtype, shards_of, stored_tensors, weight_index, write_rest
from .saved_tensors import SavedTensor, read_tensors
from .states import write_tensors
from .stored_weights import INDEX, RANGES_FOLDER, WEIGHTS, load_weights, read_weight_map, rows_of
from .tensor_file import write_safetensors


def write_ranges(directory: Path, model: ModelExport, process: int) -> dict[str, str]:
    """Write what a process has of a model, and process 0 also the other files of the model and the index.

    `model.params` of another process has divided params only. Return {file name: hash}, as `write_model` does.
    """
    dtype = saved_dtype(model)
    (directory / RANGES_FOLDER).mkdir(exist_ok=True)
    if process == 0:
        whole = [SavedTensor(t.name, t.shape, dtype) for m in model.weights for t in m.tensors]
        index = weight_index(shards_of(whole, model.max_shard_bytes))
        (directory / RANGES_FOLDER / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_rest(directory, model)
    stem = f"{RANGES_FOLDER}/model"
    return write_tensors(directory, stem, stored_tensors(model), process, model.max_shard_bytes)


def load_model(directory: Path, maps: Sequence[WeightMap], params: Mapping[str, Pieces]) -> None:
    """Copy the model of a checkpoint, in ranges or not, into what a process has of `params`, converting dtypes.

    Raises ConfigError, naming file and tensor, if it is not the model of `maps`.
    """
    if not (directory / RANGES_FOLDER).is_dir():
        load_weights(directory, maps, params)
        return
    tensors = _tensors(directory)
    for m in maps:
        for tensor, row in rows_of(m):
            found = tensors.get(tensor.name)
            if found is None or list(found.shape) != list(tensor.shape):
                held = "missing" if found is None else f"{list(found.shape)}"
                raise ConfigError(
                    f"{directory / RANGES_FOLDER}: {tensor.name} is {held}, expected {list(tensor.shape)}."
                )
            if m.param in params:
                found.read_into(params[m.param].rows(row, tensor.shape))


def join_ranges(directory: Path, source: Path) -> None:
    """Write the weights of the checkpoint `source` to `directory` as files of Hugging Face, a block at a time."""
    tensors, weight_map = _tensors(source), read_weight_map(source / RANGES_FOLDER / INDEX)
    for file in sorted(set(weight_map.values())):
        write_safetensors(directory / file, [tensors[name] for name, at in weight_map.items() if at == file])
    if set(weight_map.values()) != {WEIGHTS}:
        shutil.copyfile(source / RANGES_FOLDER / INDEX, directory / INDEX)


def _tensors(directory: Path) -> dict[str, SavedTensor]:
    """Return the tensors of the model. Raises ConfigError unless they are those that its index names."""
    folder = directory / RANGES_FOLDER
    tensors = read_tensors(sorted(folder.glob("*.safetensors")))
    if differing := sorted(tensors.keys() ^ read_weight_map(folder / INDEX).keys()):
        raise ConfigError(
            f"{folder}: its files and its {INDEX} differ in {names_text(differing)}. The checkpoint is damaged: use "
            "another one."
        )
    return tensors
