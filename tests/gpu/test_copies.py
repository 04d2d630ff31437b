"""Several ranks on one GPU: every collective has the bits of its reference, and a team trains as one rank does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace, write_model
from runtime.collective_cases import check_collectives

from surogate_core.api import World
from surogate_core.assembly.assemble import assemble
from surogate_core.runtime.comms import copies, exchange, gloo
from surogate_core.runtime.comms.single import SingleComm

from .harness import Setup, step, team_of

pytestmark = pytest.mark.gpu

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"model_dtype": "fp32"},
    "bf16": {"model_dtype": "bf16", "param_grad_dtype": "bf16"},
    "fp8": {"recipe": "fp8-hybrid", "options": {"fp8_amax_history": 4}, "param_grad_dtype": "bf16"},
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_on_one_gpu_has_the_bits_of_its_reference(ranks: int) -> None:
    check_collectives(copies.connect([0] * ranks), "cuda")


def test_the_collectives_of_one_rank_copy() -> None:
    check_collectives([SingleComm()], "cuda")


def test_large_spans_are_combined_in_pieces_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PIECE", 10)
    check_collectives(copies.connect([0] * 3), "cuda")


def test_gloo_moves_the_memory_of_one_gpu_through_the_host() -> None:
    comms = gloo.connect(World(size=2, ranks=range(2), devices=[0, 0]))
    check_collectives(comms, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs, fewer are visible")
def test_peers_read_each_others_memory() -> None:
    check_collectives(copies.connect([0, 1, 0, 1]), "cuda")


def planned(ranks: int, accumulation: int, **settings: Any) -> Setup:
    setup = Setup(**settings)
    setup.given = replace(setup.given, world_size=ranks, grad_accum_steps=accumulation)
    setup.assembly = assemble(setup.given)
    return setup


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_gpu_train_like_one_rank_with_the_same_global_batch(ranks: int) -> None:
    """Only the order of sums differs. In the first step the weights are the same, so loss and norm agree to 1e-5."""
    alone, together = planned(1, 4, **PRECISIONS["fp32"]), planned(ranks, 4 // ranks, **PRECISIONS["fp32"])
    one = alone.gpu()
    with team_of(together, copies.connect([0] * ranks)) as team:
        for number in range(1, 11):
            expected, got = (step(alone, worker, number, 4) for worker in (one, team))
            assert got == pytest.approx(expected, rel=1e-5 if number == 1 else 2e-4), number
            assert got[0] == pytest.approx(expected[0], rel=2e-5), number


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_ranks_on_one_gpu_are_bit_identical_with_graphs_and_without(precision: str) -> None:
    """Programs with collectives are not captured, the others are."""
    setup, results = planned(2, 2, **PRECISIONS[precision]), []
    for graphs in (True, False):
        with team_of(setup, copies.connect([0, 0]), graphs=graphs) as team:
            curve = [step(setup, team, number, 4) for number in range(1, 6)]
            team.settle()
            captured = team._workers[1].executor.captured
            assert ("micro_first" in captured) == graphs and "micro_last" not in captured
            first, second = (worker.buffers for worker in team._workers)
            kept = [v for v in setup.assembly.declared if v.role != "input" and v is not setup.assembly.eval_loss]
            assert not [v for v in kept if not torch.equal(first.persistent(v), second.persistent(v))]
            results.append((curve, {name: weight.cpu() for name, weight in team.params().items()}))
    (replayed, weights), (eager, others) = results
    assert replayed == eager
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_gloo_and_copies_train_to_equal_bits_on_one_gpu() -> None:
    setup = planned(2, 1, **PRECISIONS["bf16"])
    curves = []
    world = World(size=2, ranks=range(2), devices=[0, 0])
    for comms in (copies.connect([0, 0]), gloo.connect(world)):
        with team_of(setup, comms) as team:
            curves.append([step(setup, team, number, 2) for number in range(1, 4)])
    assert curves[0] == curves[1]


@pytest.fixture
def workplace(tmp_path: Any) -> Workplace:
    """Return a workplace with a model whose head_dim the kernels support."""
    place = make_workplace(tmp_path, per_device_train_batch_size=2)
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    return place


def test_a_run_of_two_ranks_on_one_gpu_reports_the_losses_of_one(workplace: Workplace) -> None:
    for name, changes in (("two", {"ranks_per_gpu": 2}), ("one", {"per_device_train_batch_size": 4})):
        done = workplace.surogate("train", workplace.write(output_dir=str(workplace.root / name), **changes))
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(workplace.root / "two") == pytest.approx(losses(workplace.root / "one"), rel=2e-5)
