"""The model of a checkpoint as files of Hugging Face, whatever number of processes wrote it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import ConfigError
from .folders import list_checkpoints
from .hf import CONFIG, save_files
from .manifest import MANIFEST, DamagedCheckpoint, read_manifest, verify_files
from .model_ranges import join_ranges
from .states import FOLDER
from .stored_weights import RANGES_FOLDER


def export_model(folder: Path, output: Path, make_room: Callable[[], object] = lambda: None) -> None:
    """Write the model of the checkpoint `folder` to `output`, a block of a tensor at a time. See `hf.save_files`.

    Raises ConfigError for a folder that is no checkpoint, is damaged, or holds an adapter.
    """
    if checkpoints := list_checkpoints(folder):
        raise ConfigError(f"{folder}: is a folder of checkpoints. Name one: {checkpoints[-1]}.")
    if not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder}: is not a checkpoint: it has no {MANIFEST}.")
    try:
        manifest = read_manifest(folder)
        if CONFIG not in manifest.files:
            raise ConfigError(
                f"{folder}: holds an adapter, not a model. Merge it into its base: surogate merge {folder} OUTPUT"
            )
        verify_files(folder, manifest)
    except DamagedCheckpoint as damage:
        raise ConfigError(f"the checkpoint is damaged: {damage}. Use another one.") from None
    files = [name for name in manifest.files if Path(name).parts[0] not in (FOLDER, RANGES_FOLDER)]
    save_files(output, lambda fresh: join_files(folder, files, fresh), CONFIG, make_room=make_room)


def join_files(folder: Path, files: Iterable[str], output: Path) -> None:
    """Copy files of `folder` to `output`, and write the weights there that `folder` has in ranges."""
    for file in files:
        (output / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / file, output / file)
    if (folder / RANGES_FOLDER).is_dir():
        join_ranges(output, folder)
