"""Training steps of the fp8-hybrid recipe on the GPU, compared with the exact references and with fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.harness import FAMILIES, Setup

from surogate_core.runtime.worker import Worker

pytestmark = pytest.mark.gpu

FP8: dict[str, Any] = {"recipe": "fp8-hybrid", "options": {"fp8_amax_history": 16}, "deterministic": "true"}
LORA = {"adapter": {"lora_rank": 16}}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def states(setup: Setup, worker: Worker, end: str) -> dict[str, torch.Tensor]:
    worker.settle()
    found = (v for v in setup.assembly.declared if v.role == "state" and v.name.endswith(end))
    return {v.name: worker.buffers.persistent(v).clone().cpu() for v in found}


def differing(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return {name for name in before if not torch.equal(bits(before[name]), bits(after[name]))}


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtypes", [{}, {"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_has_a_kernel(family: str, dtypes: dict[str, str], lora: dict[str, Any]) -> None:
    assert Setup(FAMILIES[family], **FP8, **dtypes, **lora).missing_kernels() == set()


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_as_close_to_fp32_as_those_of_the_references(family: str, lora: dict[str, Any]) -> None:
    """In the first step and in the second, which uses the scales of the first."""
    truth_setup, setup = Setup(FAMILIES[family], model_dtype="fp32", **lora), Setup(FAMILIES[family], **FP8, **lora)
    truth_worker, cpu, gpu = truth_setup.cpu(), setup.cpu(), setup.gpu()
    for step in (1, 2):
        losses = [
            its.step(w, step, step=step, lr=0.0)[0]
            for w, its in ((truth_worker, truth_setup), (cpu, setup), (gpu, setup))
        ]
        assert losses[2] == pytest.approx(losses[1], rel=2e-3) and losses[2] == pytest.approx(losses[0], rel=1e-2)
        truth = truth_setup.gradients(truth_worker)
        known = [n for n, g in truth.items() if float(g.norm()) > 0]
        reference = {n: relative(g, truth[n]) for n, g in setup.gradients(cpu).items() if n in known}
        kernels = {n: relative(g, truth[n]) for n, g in setup.gradients(gpu).items() if n in known}
        mean = sum(kernels.values()) / len(kernels), sum(reference.values()) / len(reference)
        assert mean[0] <= 1.15 * mean[1], (step, mean)


def test_scales_follow_those_of_the_references() -> None:
    """Magnitudes differ by the rounding of bf16 and of sums in another order, which grows from op to op."""
    setup = Setup(**FP8)
    cpu, gpu = setup.cpu(), setup.gpu()
    for step in range(1, 5):
        setup.step(cpu, step, step=step), setup.step(gpu, step, step=step)
        ours, theirs = states(setup, gpu, ".scale"), states(setup, cpu, ".scale")
        ratios = torch.stack([ours[name][1] / theirs[name][1] for name in theirs])
        assert float((ratios - 1).abs().max()) < 0.15, step
        assert float((ratios - 1).abs().mean()) < 0.02, step


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_captured_and_eager_steps_are_bit_identical(lora: dict[str, Any]) -> None:
    setup = Setup(**FP8, **lora)
    eager, captured = setup.gpu(graphs=False), setup.gpu(graphs=True)
    batch = setup.batch(50)
    assert eager.evaluate(batch) == captured.evaluate(batch)
    for step in range(1, 6):
        assert setup.step(eager, step, step=step) == setup.step(captured, step, step=step)
    assert eager.evaluate(batch) == captured.evaluate(batch)
    ours, theirs = setup.weights(captured), setup.weights(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for end in (".scale", ".history"):
        left, right = states(setup, captured, end), states(setup, eager, end)
        assert left and all(torch.equal(left[name], right[name]) for name in right)


def test_an_evaluation_before_the_first_step_is_close_to_bf16_and_records_nothing() -> None:
    setup, plain = Setup(**FP8), Setup()
    worker, batch = setup.gpu(), setup.batch(3)
    before = states(setup, worker, "")
    assert worker.evaluate(batch) == pytest.approx(plain.gpu().evaluate(batch), rel=2e-3)
    after = states(setup, worker, "")
    assert differing(before, after) == {"eval_loss"}


def test_a_skipped_step_changes_nothing() -> None:
    setup = Setup(**FP8)
    worker = setup.gpu()
    setup.step(worker, 1)
    before, weights = states(setup, worker, ""), setup.weights(worker)
    worker.micro_step(setup.batch(9), first=True, loss_scale=float("inf"), index=5)
    worker.update(lr=1e-3, step=2).values()
    after = states(setup, worker, "")
    assert differing(before, after) <= {"grad_norm", "step_loss"}
    assert all(torch.equal(weights[n], w) for n, w in setup.weights(worker).items())
    assert torch.isfinite(torch.tensor(setup.step(worker, 3, step=3))).all()


@pytest.mark.parametrize("parts", ["block", "att swiglu", "ffn qkv", "rmsnorm swiglu"])
def test_recomputation_changes_no_bit(parts: str) -> None:
    setups = [Setup(**FP8), Setup(**FP8, recompute=frozenset(parts.split()))]
    workers = [setup.gpu() for setup in setups]
    for step in range(1, 4):
        losses = [setup.step(worker, step, step=step) for setup, worker in zip(setups, workers, strict=True)]
        assert losses[0] == losses[1]
