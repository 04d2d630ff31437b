"""gpt-oss under fp8-hybrid on a GPU: steps whose gates write codes, against the references and fp32."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.fp8_experts import ADAPTERS, FP8, ON_SM90, check_bits, check_gradients
from gpu.harness import SMALL, Setup

pytestmark = ON_SM90

EXPERTS = 8
ALL: dict[str, Any] = SMALL | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
ALL |= {"attention_bias": True, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "intermediate_size": 80}
ALL |= {"sliding_window": 48, "swiglu_limit": 0.5, "tie_word_embeddings": False}
"""Every token goes to every expert, so that roundings choose no other ones. Some gates and values reach the limit."""
CHOSEN = ALL | {"num_experts_per_tok": 2}

every_training = pytest.mark.parametrize("adapter", ADAPTERS)


@every_training
def test_every_op_has_a_kernel_and_gates_write_codes(adapter: str) -> None:
    setup = Setup(CHOSEN, **FP8, **ADAPTERS[adapter])
    assert setup.missing_kernels() == set()
    gates = {op.kind for program in setup.assembly.programs.values() for op in program.ops if "swiglu" in op.kind}
    assert gates == {"fp8_weighted_swiglu", "fp8_weighted_swiglu_bwd"}


@every_training
def test_gradients_are_as_close_to_fp32_as_those_of_the_references(adapter: str) -> None:
    check_gradients(ALL, adapter)


@every_training
def test_captured_eager_and_recomputed_steps_are_bit_identical(adapter: str) -> None:
    check_bits(CHOSEN, adapter, steps=3)
