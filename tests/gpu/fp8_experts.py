"""Steps of mixtures under fp8-hybrid: settings, and what they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .harness import Setup

ON_SM90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="products of experts are FP8 on SM90 alone",
    ),
]
FP8: dict[str, Any] = {"recipe": "fp8-hybrid", "options": {"fp8_amax_history": 16}, "deterministic": "true"}
RANK = 16
_STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "attention": {"adapter": {"lora_rank": RANK}},
    "experts": {"adapter": {"lora_rank": RANK, "lora_target_parameters": _STACKS}},
}


def check_gradients(model: dict[str, Any], adapter: str) -> None:
    """Assert that losses are near those of the references and of fp32, and errors of gradients at most 1.15 of those of
    the references: in the first step and in the second, which uses the scales of the first.
    """
    more = ADAPTERS[adapter]
    truth_setup, setup = Setup(model, model_dtype="fp32", **more), Setup(model, **FP8, **more)
    truth_worker, cpu, gpu = truth_setup.cpu(), setup.cpu(), setup.gpu()
    for step in (1, 2):
        ways = ((truth_worker, truth_setup), (cpu, setup), (gpu, setup))
        truth_loss, of_references, loss = (its.step(w, step, step=step, lr=0.0)[0] for w, its in ways)
        assert loss == pytest.approx(of_references, rel=2e-3) and loss == pytest.approx(truth_loss, rel=1e-2)
        truth = {n: g.double() for n, g in truth_setup.gradients(truth_worker).items() if float(g.norm()) > 0}
        mean = []
        for worker in (gpu, cpu):
            found = setup.gradients(worker)
            errors = [float((found[n].double() - g).norm() / g.norm()) for n, g in truth.items()]
            mean.append(sum(errors) / len(errors))
        assert mean[0] <= 1.15 * mean[1], (step, mean)


def check_bits(model: dict[str, Any], adapter: str, steps: int) -> None:
    """Assert that captured steps, eager ones, and those whose blocks are recomputed are bit-identical. Routes change
    from step to step, the graph does not.
    """
    setup = Setup(model, **FP8, **ADAPTERS[adapter])
    saving = Setup(model, **FP8, **ADAPTERS[adapter], recompute=frozenset({"block"}))
    eager, captured, again = setup.gpu(graphs=False), setup.gpu(graphs=True), saving.gpu()
    for step in range(1, steps + 1):
        ways = ((setup, eager), (setup, captured), (saving, again))
        expected, *others = (its.step(worker, step, step=step) for its, worker in ways)
        for found in others:  # loss, norm, and a table of the routers
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    ours, theirs = setup.weights(captured), setup.weights(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
