"""The training state of a checkpoint: masters, moments and states of the recipe, which a bit-exact resume needs.

It has a folder of its own, because programs that load a model read every safetensors file next to its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from surogate_core.api.destination import STATE as FOLDER
from surogate_core.errors import ConfigError
from surogate_core.program.value import Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.pieces import Pieces

from .saved_tensors import SavedTensor, read_tensors
from .tensor_file import MAX_SHARD_BYTES, STORED_AS, Writable, split_into_shards, write_safetensors


def write_state(
    directory: Path, tensors: Iterable[Writable], process: int = 0, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, str]:
    """Write the states that a process has. See `write_tensors`."""
    return write_tensors(directory, f"{FOLDER}/state", tensors, process, max_shard_bytes)


def write_tensors(
    directory: Path, stem: str, tensors: Iterable[Writable], process: int, max_shard_bytes: int
) -> dict[str, str]:
    """Write tensors in their dtypes to files `directory/stem-*`, in shards of at most `max_shard_bytes`.

    Each process writes files of its own, with the ranges that it has of divided tensors. Return {file name: hash}. For
    use inside `save_checkpoint`: neither atomic nor synced to the disk.
    """
    shards = split_into_shards((t for t in tensors if t.count == prod(t.shape) or t.count), max_shard_bytes)
    (directory / stem).parent.mkdir(exist_ok=True)
    own = f"{stem}-process-{process:05d}" if process else stem
    names = [f"{own}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    return {name: write_safetensors(directory / name, shard) for name, shard in zip(names, shards, strict=True)}


def load_state(directory: Path, values: Sequence[Value], pieces: Callable[[Value], Pieces | None]) -> None:
    """Copy what `write_state` wrote below `directory` into what a process has of `values`, by name; None: nothing.

    Raises ConfigError as `check_state` does, before anything is copied.
    """
    tensors = check_state(directory, values)
    for value in values:
        elements = pieces(value)
        if elements is not None:
            tensors[value.name].read_into(elements)


def check_state(directory: Path, values: Sequence[Value], saved_settings: str = "") -> dict[str, SavedTensor]:
    """Return the stored states. Raise ConfigError if their names, shapes or dtypes differ from those of `values`.

    Also if a file cannot be read, or elements are missing. Reads the headers of the files alone. The error names
    `saved_settings`, which the resumed run has changed.
    """
    remedy = f"Resume with the saved settings: {saved_settings}." if saved_settings else _REMEDY
    held = read_tensors(sorted((directory / FOLDER).glob("*.safetensors")))
    for value in sorted(values, key=lambda value: value.name):
        found, shape = held.get(value.name), list(value.shard.shape if value.shard else value.stored_shape)
        if found is not None and (list(found.shape), found.dtype) != (shape, TORCH_DTYPES[value.dtype]):
            wanted = replace(value, shape=value.shard.shape) if value.shard else value
            stored = f"{STORED_AS[found.dtype]} {list(found.shape)}"
            raise ConfigError(f"{found.path}: {value.name} is {stored}, this run has {wanted!r}. {remedy}")
    if differing := sorted(held.keys() ^ {value.name for value in values}):
        raise ConfigError(
            f"{directory / FOLDER}: not the states of this run: they differ in {', '.join(differing[:3])}. {remedy}"
        )
    return held


_REMEDY = "Resume with the same optimizer, recipe, options and package versions."
