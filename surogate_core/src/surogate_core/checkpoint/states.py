"""The training state of a checkpoint: masters, moments and states of the recipe, which a bit-exact resume needs.

It has a folder of its own, because programs that load a model read every safetensors file next to its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..assembly.assembly import Assembly
from ..errors import ConfigError
from ..program.value import Value
from ..reference.rounding import TORCH_DTYPES
from .tensor_file import MAX_SHARD_BYTES, STORED_AS, Stored, split_into_shards, write_safetensors

FOLDER = "training_state"


def kept_values(assembly: Assembly, stored: Collection[str], stored_dtype: str) -> list[Value]:
    """Return the values that a checkpoint holds besides a model whose files have the params `stored` in `stored_dtype`.

    These are all states except derived ones and those that every step and evaluation overwrites, and the params that
    the model's files do not hold bit for bit.
    """
    unsaved = assembly.readings | {*assembly.pending}
    return [
        v
        for v in assembly.declared
        if (v.role == "state" and not v.derived and v not in unsaved)
        or (v.name in assembly.params and (v.name not in stored or v.dtype != stored_dtype))
    ]


def write_state(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, str]:
    """Write tensors in their dtypes below `directory`, in shards of at most `max_shard_bytes`.

    Return {file name: hash}. For use inside `save_checkpoint`: neither atomic nor synced to the disk.
    """
    shards = split_into_shards((Stored(name, tensor, tensor.dtype) for name, tensor in tensors), max_shard_bytes)
    (directory / FOLDER).mkdir()
    names = [f"{FOLDER}/state-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    return {name: write_safetensors(directory / name, shard) for name, shard in zip(names, shards, strict=True)}


def load_state(directory: Path, values: Sequence[Value], view: Callable[[Value], Tensor]) -> None:
    """Copy the tensors that `write_state` wrote below `directory` into `view(value)`, by name.

    Raises ConfigError as `check_state` does, before anything is copied.
    """
    check_state(directory, values)
    wanted = {v.name: v for v in values}
    for path in _files(directory):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                view(wanted[name]).copy_(file.get_tensor(name))


def check_state(directory: Path, values: Sequence[Value], saved_settings: str = "") -> None:
    """Raise ConfigError if names, shapes or dtypes of the stored states differ from those of `values`.

    Also if a file cannot be read. Reads the headers of the files alone. The error names `saved_settings`, which the
    resumed run has changed.
    """
    remedy = f"Resume with the saved settings: {saved_settings}." if saved_settings else _REMEDY
    wanted = {v.name: v for v in values}
    held: set[str] = set()
    for path in _files(directory):
        with _open(path) as file:
            held.update(file.keys())
            for name in sorted(wanted.keys() & set(file.keys())):
                tensor, value = file.get_slice(name), wanted[name]
                shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
                if shape != list(value.stored_shape) or dtype != STORED_AS[TORCH_DTYPES[value.dtype]]:
                    raise ConfigError(f"{path}: {name} is {dtype} {shape}, this run has {value!r}. {remedy}")
    if held != set(wanted):
        differing = ", ".join(sorted(held ^ set(wanted))[:3])
        raise ConfigError(f"{directory / FOLDER}: not the states of this run: they differ in {differing}. {remedy}")


def _files(directory: Path) -> list[Path]:
    return sorted((directory / FOLDER).glob("*.safetensors"))


_REMEDY = "Resume with the same optimizer, recipe, options and package versions."


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from None
