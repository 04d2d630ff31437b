"""Outputs of an earlier run or of another model in a folder: one rule for everything that writes outputs.

The rule covers what a run or a merge would replace or mix with its own: checkpoints, metrics of a step, files of a
model or an adapter, `adapter/`, `merged/`, the loss picture. It does not cover what a run leaves that fails before its
first step: `run.yaml`, and metrics that hold only the records of its start and its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surogate_core.api.destination import refuse_checkpoint
from surogate_core.errors import ConfigError

from ..checkpoints.adapter import ADAPTER_FOLDER, MERGED_FOLDER
from ..checkpoints.folder_lock import LOCK, locked
from ..checkpoints.folders import SAVING, free_name, half_moved, stopping_when_disk_refuses
from ..hub.files import CONFIG_FILES, SAVED_TOKENIZER_FILES, WEIGHT_FILES
from ..reporting.metrics import METRICS_FILE, parsed_record
from ..reporting.picture import PICTURE_FILE
from ..reporting.text import names_text

OUTPUTS = "outputs"
"""The outputs of an earlier run are moved to the folder `outputs.set_aside`."""

_OF_RUN = (METRICS_FILE, PICTURE_FILE, "step_*", "adapter_config.json", "adapter_model*")

_MODEL_FILES = (
    *(*CONFIG_FILES, *WEIGHT_FILES, *SAVED_TOKENIZER_FILES),
    *("pytorch_model*", "adapter_config.json", "adapter_model*", "chat_template.*"),
)


def outputs_in(folder: Path) -> list[Path]:
    """Return the outputs in a folder, sorted by name, without checkpoints and metrics."""
    found = {path for pattern in _MODEL_FILES for path in folder.glob(pattern)}
    found |= {folder / name for name in (ADAPTER_FOLDER, MERGED_FOLDER) if _entries(folder / name)}
    found |= {path for path in (folder / PICTURE_FILE,) if path.exists()}
    return sorted(found)


def has_steps(metrics: Path) -> bool:
    """Return whether a metrics file holds anything besides records of the start and of the end of a run."""
    return any(record is None or record.get("log") not in ("run", "end") for record in _lines(metrics))


def is_foreign(file: Path) -> bool:
    """Return whether the first line of a file is not a record of metrics."""
    first = next(_lines(file), {"log": "run"})
    return first is None or "log" not in first


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the lines of a regular file, None for one that is not a record. A last line cut off by a crash is
    skipped."""
    if not path.is_file():  # it does not exist, or is /dev/null
        return
    with path.open("rb") as lines:
        for line in lines:
            record = parsed_record(line)
            if record is not None or (line.strip(b" \t\r\n\0") and line.endswith(b"\n")):
                yield record


def refuse_outputs(folder: Path, key: str, source: str, *, with_metrics: bool = True) -> None:
    """Raise ConfigError for a folder with outputs of an earlier run or another model; `with_metrics`: or with steps, or
    their picture."""
    found = [path for path in outputs_in(folder) if with_metrics or path.name != PICTURE_FILE]
    if with_metrics and has_steps(folder / METRICS_FILE):
        found.append(folder / METRICS_FILE)
    if found:
        raise ConfigError(
            f"{source}: {key}: {folder} holds {_named(found)}, of an earlier run or another model. Name another {key}, "
            "or set overwrite_output_dir: true, which sets these files aside and deletes nothing."
        )


@contextmanager
def writable(folder: Path, overwrite: bool, notice: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder that a command writes a model to: the rule of all such commands on where they may.

    It must be empty unless `overwrite`, hold nothing of a run or an adapter, and be no checkpoint nor in one. What a
    killed command has moved in counts as nothing. Raises ConfigError otherwise, for a file, and as `locked` does, and
    RunStopped if the disk refuses a write. A folder that it creates is removed if the block fails.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):  # Path.exists raises for names that are too long
        raise ConfigError(f"{folder}: is a file. Name a folder for the model.")
    refuse_checkpoint(folder)
    with locked({folder: ""}, notice):
        if of_run := _of_run(folder):
            raise ConfigError(
                f"{folder}: holds {_named(of_run)}, of a run or an adapter, which is no place for another model. Name "
                "another output folder."
            )
        if not overwrite and (found := _entries(folder, without=half_moved(folder))):
            raise ConfigError(
                f"{folder}: is not empty: it holds {_named(found)}. Name another folder, or use --overwrite, which "
                "sets a model in it aside and deletes nothing."
            )
        with stopping_when_disk_refuses(folder, safe_in=None):
            yield


def refuse_inputs(folder: Path, read: Sequence[Path]) -> None:
    """Raise ConfigError if one of the folders `read`, existing or not, would be moved by `set_aside_outputs`."""
    found = outputs_in(folder)
    for source in filter(Path.exists, read):
        place = source.resolve()
        if place == folder.resolve() or any(place.is_relative_to(path.resolve()) for path in found):
            raise ConfigError(f"{source}: is an input, but would be set aside in {folder}. Name another output folder.")


def set_aside_model(folder: Path, replaced: Collection[str] = ()) -> list[Path]:
    """Move a model in a folder to its subfolder `outputs.set_aside`, for one that a command writes in its place.

    `replaced`: names of its files, of which others in the folder are moved too. What a killed command has moved in is
    no model: it stays, and is replaced. Raises as `set_aside_outputs` does.
    """
    half = half_moved(folder)
    found = {*outputs_in(folder), *(path for path in map(folder.joinpath, replaced) if path.exists())}
    return _move_aside(folder, sorted(path for path in found if path.name not in half))


def set_aside_outputs(folder: Path, read: Sequence[Path] = ()) -> list[Path]:
    """Move the outputs in a folder to its subfolder `outputs.set_aside`. Return that path, or [] without outputs.

    `read`: folders, existing or not, that are read afterwards. Raises ConfigError if one of them would be moved, or the
    disk refuses.
    """
    refuse_inputs(folder, read)
    return _move_aside(folder, outputs_in(folder))


def set_aside_merged(output: Path, kept_if: str | None, notice: Callable[[str], None]) -> None:
    """Move the merged model in the output of a run aside, before its adapter is written anew: `chat` and `export` would
    take it for that of the new adapter.

    kept_if: pattern of a file of what the run is to write in its place, which replaces such a model; None: nothing.
    Raises as `set_aside_outputs` does.
    """
    merged = output / MERGED_FOLDER
    if _entries(merged) and not (kept_if and any(merged.glob(kept_if))):
        (target,) = _move_aside(output, [merged])
        notice(f"{merged}: is of an earlier adapter, and is set aside: {target / MERGED_FOLDER}")


def _move_aside(folder: Path, found: Sequence[Path]) -> list[Path]:
    if not found:
        return []
    target = free_name(folder / OUTPUTS)
    try:
        target.mkdir()
        for path in found:
            path.rename(target / path.name)
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: cannot be set aside: {error.strerror}.") from None
    return [target]


def _of_run(folder: Path) -> list[Path]:
    """Return what no command that writes a model has written into a folder: it is of a run, or an adapter."""
    found = {path for pattern in _OF_RUN for path in folder.glob(pattern)}
    found |= {folder / name for name in (ADAPTER_FOLDER, MERGED_FOLDER) if _entries(folder / name)}
    return sorted(found)


def _entries(folder: Path, without: Collection[str] = ()) -> list[Path]:
    """Return what a folder holds, but for some names, its lock and what a killed save left."""
    own = (SAVING, LOCK)
    found = sorted(path for path in folder.iterdir() if not path.name.startswith(own)) if folder.is_dir() else []
    return [path for path in found if path.name not in without]


def _named(paths: Sequence[Path]) -> str:
    return names_text(sorted(path.name for path in paths))
