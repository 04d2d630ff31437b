"""`surogate watch`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from surogate_core.api import ConfigError

from .runs import DEEPEST, Run, RunFiles, find_runs
from .screen import screen

REFRESH_SECONDS = 1.0
SEARCH_SECONDS = 10.0
PIPED_WIDTH = 140
"""Columns if stdout is no terminal."""


def watch(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Output folders, or folders that hold some. Default: this one."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the runs as they are, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the runs as one JSON document, and end.")] = False,
) -> None:
    """Show running and finished runs, from their files: step, loss, speed and memory against the plan, time left.

    Examples:
    surogate watch output
    surogate watch output --once
    """
    watched = Watched(folders or [Path()])
    runs = watched.read()
    if not runs:
        where = ", ".join(map(str, folders)) if folders else "this folder"
        raise ConfigError(
            f"watch: no run in {where}, nor {DEEPEST} levels below. Give the output_dir of a run, or a folder of some."
        )
    if as_json:
        print(json.dumps({"runs": [run.as_json() for run in runs]}, indent=2))
        return
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PIPED_WIDTH)
    if once or not terminal:
        console.print(screen(runs))
        return
    live = Live(screen(runs), console=console, auto_refresh=False, screen=True)
    try:
        live.start(refresh=True)
        while True:
            time.sleep(REFRESH_SECONDS)
            live.update(screen(watched.read()), refresh=True)
    except KeyboardInterrupt:  # the way to end it
        pass
    finally:
        live.stop()  # gives the terminal back, also if it was being taken
    console.print(screen(watched.read()))


class Watched:
    """The runs of some folders. New ones are looked for every few seconds."""

    def __init__(self, folders: list[Path]) -> None:
        if missing := [folder for folder in folders if not folder.is_dir()]:
            raise ConfigError(f"watch: {missing[0]} is no folder. Give the output_dir of a run, or a folder of some.")
        self._folders = folders
        self._files: dict[Path, RunFiles] = {}
        self._searched = 0.0

    def read(self) -> list[Run]:
        """Return the runs as they are now."""
        if time.monotonic() - self._searched > SEARCH_SECONDS or not self._files:
            self._searched = time.monotonic()
            self._files |= {path: RunFiles(path) for path in find_runs(self._folders) if path not in self._files}
        return [self._files[path].read() for path in sorted(self._files)]
