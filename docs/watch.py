"""Prints the picture of `surogate watch` on made-up runs: python docs/watch.py > docs/watch.svg"""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from rich.console import Console

from surogate_watch.runs import RunFiles, find_runs
from surogate_watch.screen import screen

TESTS = Path(__file__).parents[1] / "plugins/surogate_watch/tests"


def picture() -> str:
    """Return the picture as SVG."""
    made_up = _made_up()
    with TemporaryDirectory() as folder:
        made_up.one_of_each(Path(folder) / "output")
        runs = [RunFiles(path).read(made_up.NOW) for path in find_runs([Path(folder)])]
    console = Console(
        width=142, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(screen(runs))
    return console.export_svg(title="surogate watch output", unique_id="watch")


def _made_up() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made_up_runs", TESTS / "made_up_runs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.stdout.write(picture())
