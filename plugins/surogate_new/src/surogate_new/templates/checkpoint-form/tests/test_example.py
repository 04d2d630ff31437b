"""The run of example/ trains on a model in the form, with this plugin as the installed package."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from surogate import run

ROOT = Path(__file__).parents[1]


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example").symlink_to(ROOT / "example")
    runpy.run_path("example/store.py", run_name="__main__")
    loaded = run.load("example/run.yaml", ["verify_outputs=false"])  # the check imports transformers, for seconds
    run.train(loaded)
    metrics = (Path(loaded.config.output_dir) / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, metrics) if line["log"] == "step"]
    assert len(losses) == loaded.config.max_steps
    assert sum(losses[-5:]) < sum(losses[:5])
    written = json.loads((Path(loaded.config.output_dir) / "config.json").read_text())
    assert "quantization_config" not in written
