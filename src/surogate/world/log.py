"""The notices of the processes of a run that are not its writer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from surogate_core.api import World
from surogate_core.api.regular_file import open_own


class ProcessLog:
    """Called with a line, keeps it, and writes it to `logs/rank_<first rank>.log` in a folder from `open` on.

    The writer may move an earlier output aside, so the folder is not used before it has opened its own.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.path = folder / "logs" / f"rank_{world.ranks[0]:05d}.log"
        self._lines: list[str] = []
        self._file: IO[str] | None = None

    def __call__(self, line: str) -> None:
        self._lines.append(line)
        self._write()

    def open(self) -> None:
        """Write to the file from now on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open_own(self.path, os.O_WRONLY | os.O_TRUNC)
        self._file = os.fdopen(file, "w", encoding="utf-8", buffering=1)
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            self._file.writelines(f"{line}\n" for line in self._lines)
            self._lines.clear()
