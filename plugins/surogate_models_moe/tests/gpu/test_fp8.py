"""Mixtures under fp8-hybrid on a GPU: steps with FP8 products of experts, against the references and fp32."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.fp8_experts import ADAPTERS, FP8, ON_SM90, RANK, check_bits, check_gradients
from gpu.harness import SMALL, Setup

pytestmark = ON_SM90

EXPERTS = 8
MIXTURE: dict[str, Any] = SMALL | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
MIXTURE |= {"num_experts": EXPERTS, "moe_intermediate_size": 80, "norm_topk_prob": True}
CHOSEN = MIXTURE | {"num_experts_per_tok": 2}
ALL = MIXTURE | {"num_experts_per_tok": EXPERTS}
"""Every token goes to every expert, so that roundings choose no other ones."""

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
    check_gradients(ALL, adapter)


@every_training
def test_captured_eager_and_recomputed_steps_are_bit_identical(adapter: str) -> None:
    check_bits(CHOSEN, adapter, steps=4)
