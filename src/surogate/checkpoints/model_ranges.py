"""A model that several processes write to a checkpoint: each the ranges of the tensors that its ranks have. Exports it.

Its folder holds the ranges, under the names and shapes of Hugging Face, and the index of the files to be made of them.
A tensor that files have in another order than the param (`HFTensor.layout`) is saved as rows of the param, because a
range of these is not one of the tensor. The index names it (IN_ROWS), and the layout moves it when files are made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from surogate_core.api import HFTensor, WeightMap
from surogate_core.api.destination import STATE
from surogate_core.errors import ConfigError
from surogate_core.runtime.pieces import Pieces

from ..hub.config_json import read_json
from ..reporting.text import names_text
from .hf import CONFIG, ModelExport, held_rows, save_files, saved_dtype, shards_of, weight_index, write_rest
from .manifest import DamagedCheckpoint, Manifest, read_manifest, verify_files
from .model_tensors import FileTensor, ModelTensor, ReadTensor
from .saved_tensors import InRows, SavedTensor, read_tensors
from .states import write_tensors
from .stored_weights import INDEX, RANGES_FOLDER, WEIGHTS, open_weights, read_weight_map, rows_of
from .tensor_file import Writable, write_safetensors
from .weights_file import AGAIN

IN_ROWS = "in_rows"
"""Key of the metadata of the index: the tensors that are saved as rows of their param."""


def write_ranges(directory: Path, model: ModelExport, process: int) -> dict[str, str]:
    """Write what a process has of a model, and process 0 also the other files of the model and the index.

    `model.params` of another process has divided params only. Return {file name: hash}, as `write_model` does.
    """
    (directory / RANGES_FOLDER).mkdir(exist_ok=True)
    if process == 0:
        whole = [SavedTensor(t.name, t.shape, saved_dtype(model, m.param)) for m in model.weights for t in m.tensors]
        index = weight_index(shards_of([*whole, *model.kept], model.max_shard_bytes))
        if in_rows := [t.name for m in model.weights for t in m.tensors if t.layout]:
            index["metadata"][IN_ROWS] = in_rows
        (directory / RANGES_FOLDER / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_rest(directory, model)
    stem = f"{RANGES_FOLDER}/model"
    own: list[Writable] = [*(held for _, held in held_rows(model)), *(model.kept if process == 0 else ())]
    return write_tensors(directory, stem, own, process, model.max_shard_bytes)


def load_model(
    directory: Path, maps: Sequence[WeightMap], params: Mapping[str, Pieces], kept: Sequence[str] = ()
) -> None:
    """Copy the model of a checkpoint, in ranges or not, into what a process has of `params`, converting dtypes.

    kept: patterns of the tensors that the checkpoint holds besides. Raises ConfigError, naming file and tensor, if it
    is not the model of `maps`.
    """
    if not (directory / RANGES_FOLDER).is_dir():
        open_weights(directory, maps, kept).load(params)
        return
    tensors = _tensors(directory)
    for m in maps:
        for tensor, row in rows_of(m):
            _check_shape(directory, tensor, tensors.get(tensor.name))
            if m.param in params:
                tensors[tensor.name].read_into(params[m.param].rows(row, tensor.rows))


def _check_shape(directory: Path, tensor: HFTensor, found: SavedTensor | None) -> None:
    """Raise ConfigError unless a checkpoint holds the rows of a tensor."""
    if found is None or list(found.shape) != list(tensor.rows):
        held = "missing" if found is None else f"{list(found.shape)}"
        raise ConfigError(f"{directory / RANGES_FOLDER}: {tensor.name} is {held}, expected {list(tensor.rows)}.")


def join_ranges(directory: Path, source: Path, moved: Mapping[str, HFTensor] = MappingProxyType({})) -> None:
    """Write the weights of the checkpoint `source` to `directory` as files of Hugging Face, a block at a time.

    moved: the tensors with a layout, by name, among them those that are saved `in_rows`.
    """
    tensors: dict[str, Writable] = {**(saved := _tensors(source))}
    for name in in_rows(source):
        _check_shape(source, moved[name], saved[name])
        tensors[name] = InRows(moved[name], saved[name])
    index = source / RANGES_FOLDER / INDEX
    weight_map, content = read_weight_map(index), read_json(index, AGAIN)
    for file in sorted(set(weight_map.values())):
        write_safetensors(directory / file, [tensors[name] for name, at in weight_map.items() if at == file])
    if set(weight_map.values()) != {WEIGHTS}:
        content["metadata"] = {key: value for key, value in content["metadata"].items() if key != IN_ROWS}
        (directory / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def in_rows(checkpoint: Path) -> list[str]:
    """Return the tensors that a checkpoint has in ranges of the rows of their params."""
    if not (checkpoint / RANGES_FOLDER).is_dir():
        return []
    path = checkpoint / RANGES_FOLDER / INDEX
    metadata = read_json(path, AGAIN).get("metadata", {})
    names = metadata.get(IN_ROWS, []) if isinstance(metadata, dict) else []
    unknown = sorted(set(names) - read_weight_map(path).keys())
    if unknown:
        raise ConfigError(f"{path}: {IN_ROWS} names {names_text(unknown)}, which it does not hold. {AGAIN}")
    return list(names)


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


def open_checkpoint(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, all of whose files are as it says. Raises ConfigError otherwise."""
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest)
    except DamagedCheckpoint as damage:
        raise ConfigError(f"the checkpoint is damaged: {damage}. Use another one.") from None
    return manifest


def model_files(manifest: Manifest) -> list[str]:
    """Return the files of the model or adapter in a checkpoint. Weights in ranges are added by `join_files`."""
    return [name for name in manifest.files if Path(name).parts[0] not in (STATE, RANGES_FOLDER)]


def export_model(
    folder: Path,
    output: Path,
    make_room: Callable[[], object] = lambda: None,
    moved: Mapping[str, HFTensor] = MappingProxyType({}),
) -> None:
    """Write the model of the checkpoint `folder` to `output`, a block of a tensor at a time. See `hf.save_files`.

    moved: see `join_ranges`. Raises ConfigError for a folder that is damaged.
    """
    files = model_files(open_checkpoint(folder))
    save_files(output, lambda fresh: join_files(folder, files, fresh, moved), CONFIG, make_room=make_room)


def range_tensors(folder: Path, moved: Mapping[str, HFTensor] = MappingProxyType({})) -> dict[str, ModelTensor]:
    """Return the tensors of a model in ranges, and the files that they are to be in. moved: see `join_ranges`."""
    tensors, weight_map = _tensors(folder), read_weight_map(folder / RANGES_FOLDER / INDEX)
    rows = set(in_rows(folder))
    found: dict[str, ModelTensor] = {}
    for name in sorted(weight_map, key=lambda name: (weight_map[name], name)):
        found[name] = FileTensor(tensors[name], folder / weight_map[name])
        if name in rows:
            _check_shape(folder, moved[name], tensors[name])
            found[name] = _from_rows(moved[name], found[name])
    return found


def _from_rows(tensor: HFTensor, held: ModelTensor) -> ReadTensor:
    """Return a tensor that is saved as rows of its param in the order of files."""
    return ReadTensor(tensor.name, tensor.shape, held.dtype, held.path, lambda: tensor.save(held[...]), by_rows=False)


def join_files(
    folder: Path, files: Iterable[str], output: Path, moved: Mapping[str, HFTensor] = MappingProxyType({})
) -> None:
    """Copy files of `folder` to `output`, and write the weights there that `folder` has in ranges (`join_ranges`)."""
    for file in files:
        (output / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / file, output / file)
    if (folder / RANGES_FOLDER).is_dir():
        join_ranges(output, folder, moved)
