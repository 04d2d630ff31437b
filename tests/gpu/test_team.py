"""Two GPUs in one process: the same training as on one, bit-identical on both, no deadlock, quick exit on errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.product import Workplace, environment, losses, make_workplace, write_model
from runtime.collective_cases import check_collectives

from surogate_core.api import World
from surogate_core.assembly.assemble import assemble
from surogate_core.runtime import nccl
from surogate_core.runtime.team import Team

from . import harness
from .harness import Setup, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs, fewer are visible"),
]

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"model_dtype": "fp32"},
    "mixed": {"model_dtype": "bf16", "master_dtype": "fp32"},
    "bf16": {"model_dtype": "bf16", "param_grad_dtype": "bf16"},
    "fp8": {"recipe": "fp8-hybrid", "options": {"fp8_amax_history": 4}, "param_grad_dtype": "bf16"},
}
TESTS = Path(__file__).parents[1]


def planned(accumulation: int, world_size: int = 2, **settings: Any) -> Setup:
    setup = Setup(**settings)
    setup.given = replace(setup.given, world_size=world_size, grad_accum_steps=accumulation)
    setup.assembly = assemble(setup.given)
    return setup


@contextmanager
def team_of(setup: Setup, *, graphs: bool = True) -> Iterator[Team]:
    """Start a team on two GPUs."""
    library = nccl.load()
    comms = nccl.connect(World(size=2, ranks=range(2), devices=[0, 1]), library, nccl.new_identity(library))
    try:
        with harness.team_of(setup, comms, graphs=graphs) as team:
            yield team
    finally:
        nccl.disconnect(comms)


def test_every_collective_of_nccl_moves_and_combines_what_its_reference_does() -> None:
    """The sum of two values does not depend on their order."""
    library = nccl.load()
    comms = nccl.connect(World(size=2, ranks=range(2), devices=[0, 1]), library, nccl.new_identity(library))
    try:
        check_collectives(comms, "cuda")
    finally:
        nccl.disconnect(comms)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("mixed", 2e-3)])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_loss_of_two_gpus_matches_one_gpu_with_the_same_global_batch(
    precision: str, tolerance: float, accumulation: int
) -> None:
    """Only the order of sums differs. In the first step the weights are the same, so loss and norm agree to 1e-5, as
    between GPU and CPU. Then fp32 drifts as GPU and CPU do over 20 steps. In bf16, a weight that rounds differently
    changes by 2^-8 of its value. Less than one in a hundred does, because the masters differ by much less, so 2e-3
    covers 2^-8 x sqrt(1/100) over all weights."""
    alone, together = (
        planned(2 * accumulation, 1, **PRECISIONS[precision]),
        planned(accumulation, **PRECISIONS[precision]),
    )
    one = alone.gpu()
    with team_of(together) as team:
        for number in range(1, 11):
            expected, got = (step(alone, w, number, 2 * accumulation) for w in (one, team))
            assert got == pytest.approx(expected, rel=1e-5 if number == 1 else 10 * tolerance), number
            assert got[0] == pytest.approx(expected[0], rel=tolerance), number


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_both_gpus_are_bit_identical_after_steps(precision: str, accumulation: int, graphs: bool) -> None:
    setup = planned(accumulation, **PRECISIONS[precision])
    with team_of(setup, graphs=graphs) as team:
        for number in range(1, 6):
            step(setup, team, number, 2 * accumulation)
        team.settle()
        first, second = (worker.buffers for worker in team._workers)
        kept = [v for v in setup.assembly.declared if v.role != "input" and v is not setup.assembly.eval_loss]
        different = [v for v in kept if not torch.equal(first.persistent(v).cpu(), second.persistent(v).cpu())]
        assert not different


@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_and_eager_steps_of_two_gpus_are_bit_identical(precision: str) -> None:
    setup = planned(2, **PRECISIONS[precision])
    results = []
    for graphs in (False, True):
        with team_of(setup, graphs=graphs) as team:
            curve = [step(setup, team, number, 4) for number in range(1, 6)]
            team.settle()
            results.append((curve, {name: weight.cpu() for name, weight in team.params().items()}))
            captured = team._workers[1].executor.captured
            assert ("micro_last" in captured) == graphs
    (eager, weights), (replayed, others) = results
    assert eager == replayed
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_evaluation_is_the_sum_over_both_gpus() -> None:
    setup = planned(1, **PRECISIONS["fp32"])
    alone = planned(1, 1, **PRECISIONS["fp32"])
    one = alone.gpu()
    batches = [setup.batch(seed) for seed in (1, 2)]
    with team_of(setup) as team:
        assert team.evaluate(*batches)[0] == pytest.approx(sum(one.evaluate(batch)[0] for batch in batches), rel=1e-6)
        empty = replace(batches[0], targets=np.full_like(batches[0].targets, -100), n_valid=0)
        assert team.evaluate(batches[1], empty) == pytest.approx(one.evaluate(batches[1]), rel=1e-6)


def thousand_steps(graphs: bool) -> None:
    """Train a tiny model, with an evaluation every 100 steps. The test below runs this in a separate process."""
    setup = planned(2, seq_len=32, **PRECISIONS["bf16"])
    with team_of(setup, graphs=graphs) as team:
        for number in range(1, 1001):
            loss, _ = step(setup, team, number, 4)
            if number % 100 == 0:
                print(number, loss, team.evaluate(setup.batch(1), setup.batch(2)), flush=True)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_thousand_steps_do_not_deadlock(graphs: bool, tmp_path: Path) -> None:
    script = f"from gpu.test_team import thousand_steps; thousand_steps({graphs})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(tmp_path, PYTHONPATH=os.pathsep.join([str(TESTS), *sys.path])),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("1000 ")


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """Return a workplace for runs on two GPUs, with a model whose head_dim the kernels support."""
    place = make_workplace(tmp_path, gpus=2, per_device_train_batch_size=2)
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    return place


def test_a_run_on_two_gpus_reports_the_losses_of_one(workplace: Workplace) -> None:
    for name, changes in (("two", {}), ("one", {"gpus": 1, "per_device_train_batch_size": 4})):
        done = workplace.surogate("train", workplace.write(output_dir=str(workplace.root / name), **changes))
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(workplace.root / "two") == pytest.approx(losses(workplace.root / "one"), rel=2e-5)


SCRIPT = """
import sys
from surogate.cli import app
from surogate_core.runtime.worker import Worker

micro_step = Worker.micro_step

def failing(self, *batches, index, **which):
    if index == 4 * 4 + 1:
        raise RuntimeError("this rank was killed")  # rank 1, in step 5: the all-reduces of rank 0 wait for it
    micro_step(self, *batches, index=index, **which)

Worker.micro_step = failing
app.main()
"""


@pytest.mark.parametrize("graphs", ["true", "false"], ids=["graphs", "eager"])
def test_a_run_exits_with_3_within_seconds_after_a_rank_fails(workplace: Workplace, graphs: str) -> None:
    config = workplace.write(max_steps=100, validation_split_ratio=0, use_cuda_graphs=graphs == "true")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(workplace.root),
    )
    assert process.stdout is not None
    seen = ""
    while "step 3/" not in " ".join(seen.split()) and (line := process.stdout.readline()):
        seen += line
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3, seen + out + err
    assert time.monotonic() - began < 10
    assert "rank 1 of 2 (device 1) failed: RuntimeError: this rank was killed" in err and "Traceback" not in err
