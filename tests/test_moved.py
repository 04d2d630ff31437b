"""Names that the program had in core until 0.2: they warn, and are the program's."""

from __future__ import annotations

import subprocess
import sys

import pytest

import surogate.run
import surogate_core.cli.app
import surogate_core.run
from surogate.cli import app


def test_the_python_api_is_that_of_the_program() -> None:
    with pytest.warns(DeprecationWarning, match=r"surogate_core\.run is surogate\.run since 0\.3"):
        assert surogate_core.run.train is surogate.run.train
    with pytest.warns(DeprecationWarning), pytest.raises(AttributeError, match="no attribute 'nothing'"):
        surogate_core.run.nothing  # noqa: B018 (it is looked up)


def test_a_script_of_an_older_installation_starts_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "main", lambda: begun.append("main"))
    begun: list[str] = []
    with pytest.warns(DeprecationWarning, match=r"surogate_core\.cli\.app is surogate\.cli\.app"):
        surogate_core.cli.app.main()
    assert begun == ["main"]


@pytest.mark.parametrize("module", ["surogate", "surogate_core"])
def test_a_module_is_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("surogate 0.")


def test_without_the_program_the_error_says_how_to_install_it() -> None:
    code = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "surogate":
            raise ModuleNotFoundError("No module named 'surogate'", name=name)

sys.meta_path.insert(0, Absent())
import surogate_core.run
surogate_core.run.train
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "surogate_core.run is surogate.run since 0.3" in done.stderr
    assert done.stderr.rstrip().endswith("pip install surogate")
