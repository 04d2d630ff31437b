"""What kernels have chosen by timing, kept on this machine: a later run takes the same and computes the same bits.

Two algorithms of a product add in different orders, and which one is faster by a hair may change from day to day. So
the first run on a kind of GPU decides, and its choices stay in a file: {description: choice}. Descriptions are the
kernels' own; one that nothing asks for does no harm.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..machine.cache_home import cache_home


class AutotuneCache:
    """The choices of a run: `keep` is what a `BindContext` offers, `save` writes what was chosen.

    The threads of a team share one: none goes on to choose before what was chosen earlier is recalled.
    """

    def __init__(self, device: str, notice: Callable[[str], None]) -> None:
        """device: the GPU's name, since choices are for a kind of GPU."""
        self._device = device
        self._notice = notice
        self._tellers: dict[str, Callable[[], Mapping[str, str]]] = {}
        self._recalling = threading.Lock()

    def keep(
        self, name: str, recall: Callable[[Mapping[str, str]], None], tell: Callable[[], Mapping[str, str]]
    ) -> None:
        """See `BindContext.autotune_cache`."""
        with self._recalling:
            if name not in self._tellers:
                recall(load_choices(choices_path(name, self._device), self._notice))
                self._tellers[name] = tell

    def save(self) -> None:
        """Write what is new. Call it when everything is bound."""
        for name, tell in self._tellers.items():
            save_choices(choices_path(name, self._device), tell(), self._notice)


def choices_path(name: str, device: str) -> Path:
    """The file for GPUs of this name: `$XDG_CACHE_HOME/surogate/choices/<name>/<device>.json`, else in `~/.cache`."""
    return cache_home() / "choices" / name / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def load_choices(path: Path, notice: Callable[[str], None]) -> dict[str, str]:
    """What was chosen before; empty where nothing was. A file that cannot be read is told of and not used."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(choice, str) for choice in found.values()):
            raise ValueError("not a mapping of strings")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notice(
            f"{path}: cannot be read ({error}). Algorithms are timed anew, so this run's last bits may differ from "
            "those of earlier runs."
        )
        return {}
    return found


def save_choices(path: Path, choices: Mapping[str, str], notice: Callable[[str], None]) -> None:
    """Add what is new. Of two processes that decide at the same time the first to write wins, for all later runs."""
    kept = load_choices(path, lambda line: None)
    together = {**choices, **kept}
    if together == kept:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(together, file, indent=0, sort_keys=True)
            Path(temporary).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        notice(
            f"{path}: cannot be written ({error.strerror or error}). A later run times its algorithms anew, and its "
            "last bits may differ. Set XDG_CACHE_HOME to a directory of yours."
        )
