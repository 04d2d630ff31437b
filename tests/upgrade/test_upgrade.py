"""Runs that earlier versions saved go on with this one (`runs.py`)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from upgrade.runs import HALF, HERE, RUNS, STEP, losses, write
from upgrade.test_saved_tokens import install

from surogate import run
from surogate.data.formats import TEXT
from surogate_core import __version__
from surogate_core.api import ConfigError

VERSIONS = sorted(path.name for path in HERE.glob("[0-9]*"))
SAVED = [(version, name) for version in VERSIONS for name in RUNS if (HERE / version / name).is_dir()]


@pytest.mark.parametrize(("version", "name"), SAVED)
def test_a_run_that_a_version_saved_goes_on_as_it_would_have_there(version: str, name: str, tmp_path: Path) -> None:
    saved = HERE / version
    config = write(tmp_path, name, saved / "full" / STEP)
    shutil.copytree(saved / name / STEP, tmp_path / "out" / STEP)
    notices: list[str] = []
    run.train(run.load(config, ["resume_from_checkpoint=true"]), notices.append)
    there = json.loads((saved / name / "losses.json").read_text())
    # Rounding differs from processor to processor; the losses of two steps differ by 1e-3 and more.
    assert losses(tmp_path / "out") == pytest.approx(there[HALF:], rel=1e-4), notices


@pytest.mark.parametrize("change", ["code", "tokens"])
def test_a_run_goes_on_with_equal_tokens_whatever_code_made_them(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = HERE / __version__ / "full"
    config = write(tmp_path, "full", saved / STEP)
    shutil.copytree(saved / STEP, tmp_path / "out" / STEP)
    loaded = run.load(config, ["resume_from_checkpoint=true"])
    if change == "code":
        monkeypatch.setattr(tokenizers, "__version__", "another")  # part of the name of a cache
        install(monkeypatch, replace(TEXT, version=2))
        run.train(loaded, lambda line: None)
        assert losses(tmp_path / "out") == pytest.approx(
            json.loads((saved / "losses.json").read_text())[HALF:], rel=1e-4
        )
        return
    data = tmp_path / "texts.jsonl"
    data.write_text(data.read_text().replace("and 3 make", "and 4 make", 1))
    with pytest.raises(ConfigError, match="was saved with training data: "):
        run.train(loaded, lambda line: None)


def test_a_version_has_every_run() -> None:
    assert __version__ in VERSIONS, "save its runs: python tests/upgrade/runs.py"
    wanted = {(version, name) for version in VERSIONS for name in RUNS} - {("0.1.0", "fp8")}
    assert wanted == set(SAVED)
    assert all((HERE / version / name / STEP / "manifest.json").is_file() for version, name in SAVED)
