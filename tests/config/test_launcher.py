"""`launcher: auto` selects the launcher that recognises the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from config.harness import FakeRegistry, load, message
from typer.testing import CliRunner

from surogate import run
from surogate.cli.app import app
from surogate_core.api import LauncherDef, World
from surogate_core.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples/quickstart.yaml"
VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class WithLaunchers(FakeRegistry):
    """Two launchers, which a variable each selects."""

    def launchers(self) -> Mapping[str, LauncherDef]:
        def launcher(name: str) -> LauncherDef:
            return LauncherDef(
                name=name,
                summary="",
                join=lambda here, options: World(),
                matches=lambda environment: name if name in environment else "",
            )

        return super().launchers() | {name: launcher(name) for name in ("ONE", "TWO")}


@pytest.mark.parametrize("keys", [{}, {"launcher": None}, {"launcher": "auto"}, {"launcher": "Auto"}])
def test_auto_selects_what_recognises_the_environment(
    keys: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(registry=WithLaunchers(), **keys).config.launcher == "local"
    monkeypatch.setenv("TWO", "")
    assert load(registry=WithLaunchers(), **keys).config.launcher == "TWO"
    assert load(registry=WithLaunchers(), launcher="one").config.launcher == "ONE"


def test_two_launchers_that_recognise_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONE", "TWO"):
        monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match=r"launcher: auto: ONE \(by ONE\) and TWO \(by TWO\) would start this run"):
        load(registry=WithLaunchers())
    assert load(registry=WithLaunchers(), launcher="two").config.launcher == "TWO"


def test_a_launcher_that_is_no_word_is_refused() -> None:
    assert "launcher: must be a name (got 3)" in message(launcher=3)


def test_variables_of_torchrun_select_its_launcher_and_leave_a_plan_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    args = ["plan", str(EXAMPLE), "--device", "h100"]
    alone = CliRunner().invoke(app, args)
    assert run.load(EXAMPLE).config.launcher == "local" and alone.exit_code == 0, alone.output
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run.load(EXAMPLE).config.launcher == "env"
    assert CliRunner().invoke(app, args).output == alone.output
