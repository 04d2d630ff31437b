"""The cache of algorithms that kernels selected by timing: later runs use the same ones and give the same bits.

Two algorithms of a matrix product sum in different orders, and which of them is faster by a small margin may change
from run to run. So the first run on a GPU model decides, and a file keeps what it selected as {key: algorithm}, with a
hash of it: another algorithm would give other bits. Kernels define the keys. Unused keys do no harm.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from surogate_core.api.sealed import sealed, unsealed

from .cache_home import device_file
from .replaced_file import replaced

_ENTRIES = "algorithms"


class AutotuneCache:
    """The cache of one run. `attach` serves `BindContext.autotune_cache`; `save` writes what was selected.

    The ranks of a team share one. Each waits until the entries of earlier runs are loaded.
    """

    def __init__(self, device: str, notice: Callable[[str], None]) -> None:
        """`device` is the name of the GPU: entries are valid for one GPU model."""
        self._device = device
        self._notice = notice
        self._dumps: dict[str, Callable[[], Mapping[str, str]]] = {}
        self._loading = threading.Lock()
        self._given: Mapping[str, Mapping[str, str]] | None = None

    def use(self, selected: Mapping[str, Mapping[str, str]]) -> None:
        """Use what another process has `selected` in place of the files. Call it before anything is bound."""
        self._given = selected

    def selected(self) -> dict[str, dict[str, str]]:
        """Return all entries by name, for `use` in other processes."""
        return {name: dict(dump()) for name, dump in self._dumps.items()}

    def attach(
        self, name: str, load: Callable[[Mapping[str, str]], None], dump: Callable[[], Mapping[str, str]]
    ) -> None:
        """See `BindContext.autotune_cache`. Only the first call for a name has an effect."""
        with self._loading:
            if name not in self._dumps:
                if self._given is None:
                    load(read_entries(device_file(f"autotune/{name}", self._device), self._notice))
                else:
                    load(self._given.get(name, {}))
                self._dumps[name] = dump

    def save(self) -> None:
        """Write new entries. Call it when everything is bound."""
        for name, dump in self._dumps.items():
            add_entries(device_file(f"autotune/{name}", self._device), dump(), self._notice)


def read_entries(path: Path, notice: Callable[[str], None]) -> dict[str, str]:
    """Return the entries of a cache file, none if it does not exist. A damaged file is reported and ignored."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and _ENTRIES in found:
            found = unsealed(found)[_ENTRIES]  # files of 0.1.0 and 0.2.0 hold the entries alone
        if not isinstance(found, dict) or not all(isinstance(algorithm, str) for algorithm in found.values()):
            raise ValueError("not a mapping of strings")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notice(
            f"{path}: cannot be read ({error}). Algorithms are timed again, so the last bits of this run may differ "
            "from those of earlier runs."
        )
        return {}
    return found


def add_entries(path: Path, entries: Mapping[str, str], notice: Callable[[str], None]) -> None:
    """Add new entries to a cache file. Existing ones stay: of two concurrent runs, the first to write decides."""
    existing = read_entries(path, lambda line: None)
    merged = {**entries, **existing}
    if merged == existing:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as fresh:
            fresh.write_text(json.dumps(sealed({_ENTRIES: merged}), indent=0, sort_keys=True), encoding="utf-8")
    except OSError as error:
        notice(
            f"{path}: cannot be written ({error.strerror or error}). A later run times its algorithms again, and its "
            "last bits may differ. Set XDG_CACHE_HOME to a folder that you can write to."
        )
