"""Checks of launchers. An example names a command that starts processes: {"command": ["torchrun", ..., "{config}"]}."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from surogate_core.api import JoinContext, LauncherDef, World
from surogate_core.errors import ConfigError, SurogateError

from ..bench import Bench
from ..check import NotApplicable, proves


@proves("launcher", remedy="LauncherDef.matches must be false where its variables are not set.")
def it_is_chosen_only_in_its_own_environment(definition: LauncherDef, bench: Bench) -> None:
    assert not definition.matches({}), "matches is true in an empty environment, so it would start every run"
    assert not definition.matches({"PATH": "/bin", "HOME": "/root"}), "matches is true where only PATH and HOME are set"


@proves("launcher", remedy="Raise ConfigError that names the missing variables or keys.")
def without_its_processes_it_is_one_or_is_refused(definition: LauncherDef, bench: Bench) -> None:
    if definition.join is None:
        raise NotApplicable("it starts processes, and joins none")
    try:
        world = definition.join(JoinContext(environment={}, device_count=1, on_gpu=False), definition.options())
    except ConfigError:
        return
    assert isinstance(world, World), f"join returns {world!r:.60}, expected a World"
    sizes = (world.size, world.processes, world.nodes, len(world.ranks), len(world.devices))
    assert sizes == (1, 1, 1, 1, 1), (
        f"without other processes its world has {sizes} ranks, processes, nodes, own ranks, devices"
    )
    world.store.set("conformance", b"1")
    assert world.store.get("conformance", 1.0) == b"1", "its store does not return what was set"
    world.store.close()


@proves("launcher", remedy="All processes must join one world: ranks without a gap, one store, process 0 with rank 0.")
def two_processes_train_as_one_run(definition: LauncherDef, bench: Bench) -> None:
    commands = [example for example in bench.subject.examples(definition) if "command" in example]
    if not commands:
        where = f'SUROGATE_EXAMPLES = {{"launcher {definition.name}": [{{"command": ["torchrun", "{{config}}"]}}]}}'
        raise NotApplicable(f"nothing says how its processes are started. Give an example: {where}")
    rows: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 1}
    alone = bench.train(**{**rows, "per_device_train_batch_size": 2})
    for example in commands:
        output = bench._new("launched")
        output.rmdir()
        config = bench.config({**rows, "launcher": definition.name}, output)
        command = [part.format(python=sys.executable, config=config) for part in example["command"]]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300, env=_environment(bench)
        )
        assert done.returncode == 0, f"{' '.join(command)} ends with {done.returncode}: {done.stderr.strip()[-400:]}"
        ours = _losses(output)
        assert list(ours) == list(alone.losses), f"the run has the steps {list(ours)}, not {list(alone.losses)}"
        for step, loss in ours.items():
            expected = alone.losses[step]
            assert abs(loss - expected) <= 1e-4 * expected, (
                f"the loss of step {step} is {loss:.5f}, in one process {expected:.5f}"
            )


def _environment(bench: Bench) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def _losses(folder: Path) -> dict[int, float]:
    try:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise SurogateError(f"no process wrote metrics: {error}") from None
    return {r["step"]: r["loss"] for r in records if r["log"] == "step"}
