"""gpt-oss under fp8-hybrid on a GPU: steps whose gates write codes, against the references and fp32."""

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
ALL: dict[str, Any] = SMALL | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
ALL |= {"attention_bias": True, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "intermediate_size": 80}
ALL |= {"sliding_window": 48, "swiglu_limit": 0.5, "tie_word_embeddings": False}
"""Every token goes to every expert, so that roundings choose no other ones. Some gates and values reach the limit."""
CHOSEN = ALL | {"num_experts_per_tok": 2}

FP8: dict[str, Any] = {"recipe": "fp8-hybrid", "options": {"fp8_amax_history": 16}, "deterministic": "true"}
EXPERTS_OF = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "attention": {"adapter": {"lora_rank": 16}},
    "experts": {"adapter": {"lora_rank": 16, "lora_target_parameters": EXPERTS_OF}},
}
every_training = pytest.mark.parametrize("adapter", ADAPTERS)


@every_training
def test_every_op_has_a_kernel_and_gates_write_codes(adapter: str) -> None:
    setup = Setup(CHOSEN, **FP8, **ADAPTERS[adapter])
    assert setup.missing_kernels() == set()
    gates = {op.kind for program in setup.assembly.programs.values() for op in program.ops if "swiglu" in op.kind}
    assert gates == {"fp8_weighted_swiglu", "fp8_weighted_swiglu_bwd"}


@every_training
def test_gradients_are_as_close_to_fp32_as_those_of_the_references(adapter: str) -> None:
    """In the first step and in the second, which uses the scales of the first."""
    more = ADAPTERS[adapter]
    truth_setup, setup = Setup(ALL, model_dtype="fp32", **more), Setup(ALL, **FP8, **more)
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


@every_training
def test_captured_and_eager_steps_are_bit_identical(adapter: str) -> None:
    """And those whose blocks are recomputed."""
    setup = Setup(CHOSEN, **FP8, **ADAPTERS[adapter])
    saving = Setup(CHOSEN, **FP8, **ADAPTERS[adapter], recompute=frozenset({"block"}))
    eager, captured, again = setup.gpu(graphs=False), setup.gpu(graphs=True), saving.gpu()
    for step in range(1, 4):
        ways = ((setup, eager), (setup, captured), (saving, again))
        expected, *others = (its.step(worker, step, step=step) for its, worker in ways)
        for found in others:  # loss, norm, and a table of the routers
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    ours, theirs = setup.weights(captured), setup.weights(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
