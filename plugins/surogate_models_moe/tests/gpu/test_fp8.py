"""Mixtures under fp8-hybrid on a GPU: steps with FP8 products of experts, against the references and fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu.harness import SMALL, Setup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="products of experts are FP8 on SM90 alone",
    ),
]

EXPERTS = 8
MIXTURE: dict[str, Any] = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
MIXTURE |= {"num_experts": EXPERTS, "moe_intermediate_size": 80, "norm_topk_prob": True}
CHOSEN = MIXTURE | {"num_experts_per_tok": 2}
ALL = MIXTURE | {"num_experts_per_tok": EXPERTS}
"""Every token goes to every expert, so that roundings choose no other ones."""

FP8: dict[str, Any] = {"recipe": "fp8-hybrid", "options": {"fp8_amax_history": 16}, "deterministic": "true"}
RANK = 16
EXPERTS_OF = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "attention": {"adapter": {"lora_rank": RANK}},
    "experts": {"adapter": {"lora_rank": RANK, "lora_target_parameters": EXPERTS_OF}},
}
every_training = pytest.mark.parametrize("adapter", ADAPTERS)


@every_training
def test_every_op_has_a_kernel(adapter: str) -> None:
    setup = Setup(CHOSEN, **FP8, **ADAPTERS[adapter])
    assert setup.missing_kernels() == set()
    ops = [op for program in setup.assembly.programs.values() for op in program.ops]
    assert any(op.kind == "fp8_grouped_linear" for op in ops)
    # those of adapters, of which weights have as many columns as the rank, stay in bf16
    assert all(op.ins[1].shape[1] == RANK for op in ops if op.kind == "grouped_linear_dgrad")


@every_training
def test_gradients_are_as_close_to_fp32_as_those_of_the_references(adapter: str) -> None:
    """In the first step and in the second, which uses the scales of the first."""
    more = ADAPTERS[adapter]
    truth_setup, setup = Setup(ALL, model_dtype="fp32", **more), Setup(ALL, **FP8, **more)
    truth_worker, cpu, gpu = truth_setup.cpu(), setup.cpu(), setup.gpu()
    for step in (1, 2):
        losses = [
            its.step(w, step, step=step, lr=0.0)[0]
            for w, its in ((truth_worker, truth_setup), (cpu, setup), (gpu, setup))
        ]
        assert losses[2] == pytest.approx(losses[1], rel=2e-3) and losses[2] == pytest.approx(losses[0], rel=1e-2)
        truth = {n: g.double() for n, g in truth_setup.gradients(truth_worker).items() if float(g.norm()) > 0}
        errors = []
        for worker in (gpu, cpu):
            found = setup.gradients(worker)
            errors.append([float((found[n].double() - g).norm() / g.norm()) for n, g in truth.items()])
        mean = [sum(each) / len(each) for each in errors]
        assert mean[0] <= 1.15 * mean[1], (step, mean)


@every_training
def test_captured_and_eager_steps_are_bit_identical(adapter: str) -> None:
    """Routes change from step to step, the graph does not. Recomputation changes no bit either."""
    setup = Setup(CHOSEN, **FP8, **ADAPTERS[adapter])
    saving = Setup(CHOSEN, **FP8, **ADAPTERS[adapter], recompute=frozenset({"block"}))
    eager, captured, again = setup.gpu(graphs=False), setup.gpu(graphs=True), saving.gpu()
    for step in range(1, 5):
        ways = ((setup, eager), (setup, captured), (saving, again))
        expected, *others = (its.step(worker, step, step=step) for its, worker in ways)
        for found in others:  # loss, norm, and a table of the routers
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    ours, theirs = setup.weights(captured), setup.weights(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
