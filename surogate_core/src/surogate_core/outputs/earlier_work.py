"""What a folder holds of an earlier run, or of another model: the one rule for everything that writes outputs.

Whatever a run or a merge would replace, or mix with its own, counts: checkpoints, metrics with a step, files of a model
or an adapter, `adapter/`, `merged/`, the loss picture. What a run leaves that failed before its first step does not: a
`run.yaml`, and metrics that only say that it began.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.adapter import ADAPTER_FOLDER, MERGED_FOLDER
from ..checkpoint.folders import SAVING, free_name
from ..errors import ConfigError
from ..hub.files import CONFIG_FILES
from ..reporting.metrics import METRICS_FILE
from ..reporting.picture import PICTURE_FILE

OUTPUTS = "outputs"
"""`outputs.set_aside` is the folder that the outputs of an earlier run are moved to."""

_OF_A_MODEL = (
    *(*CONFIG_FILES, "*.safetensors", "*.safetensors.index.json", "pytorch_model*"),
    *("adapter_config.json", "adapter_model*", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*"),
)
_MOST_NAMES = 3


def outputs_in(folder: Path) -> list[Path]:
    """The outputs in a folder, by name, without checkpoints and metrics."""
    found = {path for pattern in _OF_A_MODEL for path in folder.glob(pattern)}
    found |= {folder / name for name in (ADAPTER_FOLDER, MERGED_FOLDER) if _entries(folder / name)}
    found |= {path for path in (folder / PICTURE_FILE,) if path.exists()}
    return sorted(found)


def has_steps(records: Path) -> bool:
    """Whether a metrics file holds anything but that a run began."""
    return any(record is None or record.get("log") != "run" for record in _lines(records))


def is_foreign(file: Path) -> bool:
    """Whether a file does not begin as metrics do."""
    first = next(_lines(file), {"log": "run"})
    return first is None or "log" not in first


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a regular file, None for one that is no JSON object. A last line that a crash tore is left out."""
    if not path.is_file():  # nothing, or /dev/null
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _parsed(line)
            if record is not None or (line.strip(b" \t\r\n\0") and line.endswith(b"\n")):
                yield record


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def refuse_outputs(folder: Path, key: str, source: str, *, with_metrics: bool = True) -> None:
    """Raise ConfigError for a folder with outputs of an earlier run or another model, or, `with_metrics`, its steps."""
    found = outputs_in(folder)
    if with_metrics and has_steps(folder / METRICS_FILE):
        found.append(folder / METRICS_FILE)
    if found:
        raise ConfigError(
            f"{source}: {key}: {folder} holds {_named(found)}, of an earlier run or another model. Name another {key}, "
            "or say overwrite_output_dir: true, which sets aside what is there and deletes nothing."
        )


def refuse_metrics(records: Path, source: str) -> None:
    """Raise ConfigError for a `log_file` that holds an earlier run's steps."""
    if has_steps(records):
        raise ConfigError(
            f"{source}: log_file: {records} holds the metrics of an earlier run. Name another log_file, or say "
            "overwrite_output_dir: true, which sets it aside."
        )


def refuse_nonempty(folder: Path) -> None:
    """Raise ConfigError for a path that a merged model cannot be written to without mixing with what is there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file. Name a folder for the merged model.")
    if found := _entries(folder):
        raise ConfigError(
            f"{folder}: is not empty, it holds {_named(found)}. Name another folder, or say --overwrite, which sets "
            "aside the model that is there and deletes nothing."
        )


def set_aside_outputs(folder: Path, read: Sequence[Path] = ()) -> list[Path]:
    """Move the outputs in a folder into `outputs.set_aside` there; returns that path, if there are any.

    `read`: folders that are still to be read, where they exist. Raises ConfigError if one of them would be moved,
    or the disk refuses.
    """
    found = outputs_in(folder)
    for source in filter(Path.exists, read):
        place = source.resolve()
        if place == folder.resolve() or any(place.is_relative_to(path.resolve()) for path in found):
            raise ConfigError(
                f"{source}: is read, and would be set aside in {folder}. Name another folder to write to."
            )
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


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, without what a killed save left."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(SAVING)) if folder.is_dir() else []


def _named(paths: Collection[Path]) -> str:
    names = sorted(path.name for path in paths)
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
