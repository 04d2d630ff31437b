"""LoRA on the GPU: compared with the CPU, captured with eager, and the base weights unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.assembly.recomputed import PARTS
from surogate_core.runtime.worker import Worker

from .harness import FAMILIES, Setup
from .test_worker import BF16, FP32, MIXED, relative

pytestmark = pytest.mark.gpu

ALL: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 6}
SOME: dict[str, Any] = {
    "lora_rank": 3,
    "lora_target_modules": ["q_proj", "v_proj", "up_proj", "layers.1.mlp.down_proj"],
}
"""Some columns between the branches have no adapter, and the rank is not a multiple of 8."""
DTYPES = {"fp32": FP32, "bf16": BF16, "mixed": MIXED, "bf16 adapter": {"model_dtype": "bf16", "adapter_dtype": "bf16"}}
DROPPING = SOME | {"lora_dropout": 0.2}
TARGETS = {"all": ALL, "some": SOME, "dropout": DROPPING}


def with_random_b(worker: Worker, setup: Setup) -> Worker:
    """Set the B matrices to random values, so that A has a gradient and the branches are not zero."""
    trainable = {v.name for v in setup.assembly.trainable}
    gen = torch.Generator().manual_seed(5)
    for name, param in sorted(worker.params().items()):
        if name in trainable and name.endswith("lora_B"):
            param.copy_(0.1 * torch.randn(param.shape, generator=gen))
    return worker


def frozen(setup: Setup, worker: Worker) -> dict[str, Tensor]:
    trainable = {v.name for v in setup.assembly.trainable}
    return {name: w for name, w in setup.weights(worker).items() if name not in trainable}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("family", ["qwen3", "llama with yarn and biases"])
def test_every_op_has_a_kernel(family: str, targets: dict[str, Any], dtypes: dict[str, str]) -> None:
    assert Setup(FAMILIES[family], adapter=targets, **dtypes).missing_kernels() == set()


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_fp32_losses_and_gradients_match_the_cpu(targets: dict[str, Any]) -> None:
    """As in full training, both sum in fp32 in a different order."""
    setup = Setup(adapter=targets, **FP32)
    cpu, gpu = with_random_b(setup.cpu(), setup), with_random_b(setup.gpu(), setup)
    expected, got = setup.step(cpu, 1, lr=0.0), setup.step(gpu, 1, lr=0.0)
    assert got == pytest.approx(expected, rel=1e-5)
    theirs, ours = setup.gradients(cpu), setup.gradients(gpu)
    assert set(ours) == {f"grad.{v.name}" for v in setup.assembly.trainable}
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) < 1e-5, {n: e for n, e in errors.items() if e >= 1e-5}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_bf16_gradients_are_as_close_to_fp32_as_the_references(targets: dict[str, Any]) -> None:
    """The error relative to fp32 is at most 1.1 times that of the bf16 references on average, and 1.5 times for any
    gradient."""
    truth_setup, setup = Setup(adapter=targets, **FP32), Setup(adapter=targets, **BF16)
    truth_worker, cpu, gpu = truth_setup.cpu(), with_random_b(setup.cpu(), setup), with_random_b(setup.gpu(), setup)
    for name, weight in cpu.params().items():
        truth_worker.params()[name].copy_(weight.float())
    readings = [its.step(w, 1, lr=0.0) for w, its in ((truth_worker, truth_setup), (cpu, setup), (gpu, setup))]
    assert readings[2] == pytest.approx(readings[0], rel=2e-2)
    truth = truth_setup.gradients(truth_worker)
    reference, kernels = (
        {n: relative(g, truth[n]) for n, g in setup.gradients(worker).items()} for worker in (cpu, gpu)
    )
    assert sum(kernels.values()) <= 1.1 * sum(reference.values())
    worst = max(kernels, key=lambda n: kernels[n] / reference[n])
    assert kernels[worst] <= 1.5 * reference[worst], (worst, kernels[worst], reference[worst])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_captured_and_eager_steps_are_bit_identical_and_leave_the_base_unchanged(dtypes: dict[str, str]) -> None:
    setup = Setup(adapter=DROPPING, **dtypes)
    eager, captured = setup.gpu(graphs=False), setup.gpu(graphs=True)
    before, start = frozen(setup, captured), setup.weights(captured)
    for step in range(1, 6):
        assert setup.step(eager, step, step=step) == setup.step(captured, step, step=step)
    ours, theirs = setup.weights(captured), setup.weights(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(before[name], weight) for name, weight in frozen(setup, captured).items())
    assert all(not torch.equal(start[v.name], ours[v.name]) for v in setup.assembly.trainable)


def test_twenty_fp32_steps_match_the_cpu() -> None:
    setup = Setup(adapter=ALL, **FP32)
    cpu, gpu = setup.cpu(), setup.gpu()
    for step in range(1, 21):
        expected, got = setup.step(cpu, step, step=step), setup.step(gpu, step, step=step)
        assert got[0] == pytest.approx(expected[0], rel=2e-5), step


def test_evaluation_has_no_dropout_and_matches_the_cpu() -> None:
    setup = Setup(adapter=ALL | {"lora_dropout": 0.5}, **FP32)
    cpu, gpu = with_random_b(setup.cpu(), setup), with_random_b(setup.gpu(), setup)
    batch = setup.batch(5)
    without = Setup(adapter=ALL, **FP32)
    expected = with_random_b(without.cpu(), without).evaluate(batch)
    assert cpu.evaluate(batch) == expected
    assert gpu.evaluate(batch) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("parts", ["qkv ffn", "block", " ".join(PARTS)])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_is_bit_identical(dropout: float, parts: str) -> None:
    adapter = ALL | {"lora_dropout": dropout}
    plain, saving = Setup(adapter=adapter, **BF16), Setup(adapter=adapter, recompute=frozenset(parts.split()), **BF16)
    a, b = with_random_b(plain.gpu(), plain), with_random_b(saving.gpu(), saving)
    for step in range(1, 4):
        assert plain.step(a, step, step=step) == saving.step(b, step, step=step)
