"""The check of launchers that starts processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import surogate_launch_env.plugin
from surogate_conformance import bench_folder
from surogate_conformance.bench import Bench
from surogate_conformance.cases import cases
from surogate_conformance.subject import found

TORCHRUN = [
    "{python}",
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "-m",
    "surogate_core",
    "train",
    "{config}",
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "state"), [(TORCHRUN, "passed"), (["{python}", "-c", "pass"], "failed")])
def test_two_processes_of_a_launcher_train_as_one_run(
    command: list[str], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = {"launcher env": [{"command": command}]}
    monkeypatch.setattr(surogate_launch_env.plugin, "SUROGATE_EXAMPLES", examples, raising=False)
    with found("surogate-launch-env") as subject, bench_folder() as folder:
        (case,) = (c for c in cases(subject, Bench(subject, folder)) if "two processes" in str(c))
        result = case.run()
    assert result.state == state, str(result)
