"""The same programs on the GPU and on the CPU, eager and captured, give matching results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import covering
import pytest
import torch

from surogate_core.assembly.recomputed import PARTS, Recomputation

from .harness import FAMILIES, Setup

pytestmark = pytest.mark.gpu

FP32 = {"model_dtype": "fp32"}
BF16: dict[str, str] = {}
MIXED = {"model_dtype": "bf16", "master_dtype": "fp32"}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtypes", [FP32, BF16, MIXED], ids=["fp32", "bf16", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_has_a_kernel(family: str, dtypes: dict[str, str]) -> None:
    assert Setup(FAMILIES[family], **dtypes).missing_kernels() == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_gradients_match_the_cpu(family: str) -> None:
    """Both sum in fp32 in a different order. 1e-5 of the norm covers sums over 256 tokens and 1,024 columns."""
    setup = Setup(FAMILIES[family], **FP32)
    cpu, gpu = setup.cpu(), setup.gpu()
    expected, got = setup.step(cpu, 1, lr=0.0), setup.step(gpu, 1, lr=0.0)
    assert got == pytest.approx(expected, rel=1e-5)
    theirs, ours = setup.gradients(cpu), setup.gradients(gpu)
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) < 1e-5, {n: e for n, e in errors.items() if e >= 1e-5}


@pytest.mark.parametrize("dtypes", [BF16, MIXED], ids=["bf16", "mixed"])
def test_bf16_gradients_are_as_close_to_fp32_as_the_references(dtypes: dict[str, str]) -> None:
    """The error of the kernels relative to fp32 is on average at most 1.1 times that of the bf16 references."""
    truth_setup, setup = Setup(**FP32), Setup(**dtypes)
    truth_worker, cpu, gpu = truth_setup.cpu(), setup.cpu(), setup.gpu()
    for name, weight in cpu.params().items():
        truth_worker.params()[name].copy_(weight.float())
    for worker, its in ((truth_worker, truth_setup), (cpu, setup), (gpu, setup)):
        its.step(worker, 1, lr=0.0)
    truth = truth_setup.gradients(truth_worker)
    reference = {n: relative(g, truth[n]) for n, g in setup.gradients(cpu).items()}
    kernels = {n: relative(g, truth[n]) for n, g in setup.gradients(gpu).items()}
    mean = sum(kernels.values()) / len(kernels), sum(reference.values()) / len(reference)
    assert mean[0] <= 1.1 * mean[1], mean
    worst = max(kernels, key=lambda n: kernels[n] / reference[n])
    assert kernels[worst] <= 1.5 * reference[worst], (worst, kernels[worst], reference[worst])


@pytest.mark.parametrize("dtypes", [FP32, BF16, MIXED], ids=["fp32", "bf16", "mixed"])
def test_captured_and_eager_steps_are_bit_identical(dtypes: dict[str, str]) -> None:
    setup = Setup(**dtypes)
    eager, captured = setup.gpu(graphs=False), setup.gpu(graphs=True)
    for step in range(1, 6):
        assert setup.step(eager, step, step=step) == setup.step(captured, step, step=step)
    ours, theirs = setup.weights(captured), setup.weights(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_twenty_fp32_steps_match_the_cpu() -> None:
    setup = Setup(**FP32)
    cpu, gpu = setup.cpu(), setup.gpu()
    for step in range(1, 21):
        expected, got = setup.step(cpu, step, step=step), setup.step(gpu, step, step=step)
        assert got[0] == pytest.approx(expected[0], rel=2e-5), step


def test_evaluation_matches_the_cpu_and_changes_no_weight() -> None:
    setup = Setup(**FP32)
    cpu, gpu = setup.cpu(), setup.gpu()
    before = setup.weights(gpu)
    batch = setup.batch(5)
    assert gpu.evaluate(batch) == pytest.approx(cpu.evaluate(batch), rel=1e-5)
    assert all(torch.equal(before[n], w) for n, w in setup.weights(gpu).items())


@pytest.mark.parametrize("unlabelled", [0.0, 0.7, 1.0])
def test_skipping_chunks_without_labels_does_not_change_results(unlabelled: float) -> None:
    """Captured, eager and CPU results agree if all chunks run, a few of them, or only the first, which always runs."""
    setup = Setup(lmhead_chunks=8, unlabelled=unlabelled, **FP32)
    cpu, eager, captured = setup.cpu(), setup.gpu(graphs=False), setup.gpu()
    losses = {}
    for name, worker in (("cpu", cpu), ("eager", eager), ("captured", captured)):
        batches = [setup.batch(seed) for seed in (3, 4)]
        for i, batch in enumerate(batches):
            worker.micro_step(batch, first=i == 0, loss_scale=1 / 256, index=i)
        losses[name] = worker.update(lr=0.0, step=1).values()
    assert losses["captured"] == losses["eager"] == pytest.approx(losses["cpu"], rel=1e-5)
    theirs, ours = setup.gradients(cpu), setup.gradients(captured)
    assert max(relative(ours[name], theirs[name]) for name in theirs) < 1e-5


CHOSEN = Recomputation(frozenset({"rmsnorm", "swiglu"}), frozenset({"block"}), 1)
"""The first block wholly, less of the others: of the form that `recompute: auto` chooses."""


def recomputation(chosen: frozenset[str]) -> dict[str, Any]:
    """Return the settings of a run that recomputes the chosen parts, with "chunks" in its attention backward."""
    return {"recompute": chosen - {"chunks"}, "attn_bwd_chunks": 2 if "chunks" in chosen else 1}


@pytest.mark.parametrize(
    "recomputed",
    [*map(recomputation, covering.settings((*PARTS, "chunks"), ("adapter", "block"))), {"recompute_chosen": CHOSEN}],
    ids=lambda given: "+".join(sorted(given.get("recompute", ["chosen"]))) + f"-{given.get('attn_bwd_chunks', 1)}",
)
def test_recomputation_is_bit_identical(recomputed: dict[str, Any]) -> None:
    """A pairwise covering array of the keys, all of them, and other parts in the first block than in the others."""
    plain, saving = Setup(**BF16), Setup(**recomputed, **BF16)
    a, b = plain.gpu(), saving.gpu()
    for step in range(1, 4):
        assert plain.step(a, step, step=step) == saving.step(b, step, step=step)


@pytest.mark.parametrize(("more", "suffix"), [(0, "@2"), (4, "@8"), (62, "")], ids=["full rows", "few", "many"])
def test_a_batch_runs_the_variant_for_its_documents_with_the_results_of_the_full_program(
    more: int, suffix: str
) -> None:
    """Full rows have an attention of their own. Both round to bf16 some ten times in four layers: 2^-5 is ample, and
    attention across documents would change gradients by their own size."""
    setup = Setup(max_documents=64, **BF16)
    with_variants = setup.gpu()
    setup.assembly = replace(setup.assembly, variants={})
    without = setup.gpu()
    ran: list[str] = []
    run = with_variants.executor.run
    with_variants.execute_by(lambda name, labels: (ran.append(name), run(name, labels))[1])
    batch = setup.batch(3, more=more)
    readings = []
    for worker in (with_variants, without):
        worker.micro_step(batch, first=True, loss_scale=1 / batch.n_valid, index=0)
        readings.append(worker.update(lr=0.0, step=1).values())
    assert ran == [f"micro_first{suffix}", "update"]
    assert readings[0] == pytest.approx(readings[1], rel=2.0**-5)
    ours, theirs = setup.gradients(with_variants), setup.gradients(without)
    assert max(relative(ours[name], theirs[name]) for name in theirs) < 2.0**-5
    assert with_variants.evaluate(batch) == pytest.approx(without.evaluate(batch), rel=2.0**-8)
    assert ran[2:] == [f"evaluate{suffix}"]
