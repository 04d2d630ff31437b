"""Places that a command may write to: never in a checkpoint of a run, nor where a run would take a folder for one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ConfigError
from .json_object import read_json_object
from .regular_file import is_regular

MANIFEST = "manifest.json"
"""The file that lists a checkpoint."""
STATE = "training_state"
"""The folder in it with the optimizer's state."""
RUN_FILE = "run.yaml"
"""The config, in the folder around the checkpoints."""

STEP = re.compile(r"step_(\d{8,})")
"""The name of a checkpoint."""
PARTIAL, REPLACED, REMOVED = ".partial", ".replaced", ".removed"
"""After such a name: being written; complete, until a new one of that step has its name; being deleted."""


def refuse_checkpoint(path: Path, where: str = "") -> None:
    """Raise ConfigError if `path`, existing or not, is a checkpoint of a run or lies in one; the message begins with
    `where`. A run deletes its checkpoints, and one with another file in it is damaged."""
    real = Path(os.path.realpath(path))
    for place in (real, *real.parents):
        if is_checkpoint(place):
            what = "is" if place == real else f"is inside of {place},"
            raise ConfigError(f"{where}{path}: {what} a checkpoint, which its run may delete. Name another place.")
    if STEP.match(real.name) and _is_of_run(real.parent):
        raise ConfigError(
            f"{where}{path}: has the name of a checkpoint in the folder of a run, which would take it for its own. "
            "Name another place."
        )


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, whole, damaged, or being written or deleted."""
    step = STEP.match(folder.name) is not None
    if step and folder.name.endswith((PARTIAL, REPLACED, REMOVED)) and folder.is_dir():
        return True
    if not is_regular(folder / MANIFEST):
        return False
    if step or os.path.isdir(folder / STATE):
        return True
    try:  # the user gave it another name; other programs have files of this name too
        return {"format", "step", "facts", "files"} <= read_json_object(folder / MANIFEST).keys()
    except ConfigError:
        return False


def _is_of_run(folder: Path) -> bool:
    return is_regular(folder / RUN_FILE) or any(map(is_checkpoint, folder.glob("step_*")))
