"""The run of example/ trains, with this plugin as the installed package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surogate import run

ROOT = Path(__file__).parents[1]


def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example").symlink_to(ROOT / "example")
    for config in sorted((ROOT / "example").glob("*.yaml")):
        loaded = run.load(config, ["verify_outputs=false"])  # the check imports transformers, for seconds
        run.train(loaded)
    metrics = (Path(loaded.config.output_dir) / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, metrics) if line["log"] == "step"]
    assert len(losses) == loaded.config.max_steps
    assert sum(losses[-5:]) < sum(losses[:5])
