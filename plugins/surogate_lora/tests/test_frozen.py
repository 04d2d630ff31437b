"""What is frozen costs nothing: no gradient of it is computed, none is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from models.harness import OPS, plan_inputs, tiny_config

from surogate_core.api import Op, Program, Value
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.memory.alignment import align
from surogate_core.memory.plan import plan
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions

FAMILIES: Mapping[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": True},
    "qwen3 tied": {"tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
}


def adapted(config: Mapping[str, Any], **options: Any) -> Assembly:
    return assemble(plan_inputs(config, adapters=[(LORA, LoraOptions(lora_rank=2, **options))]))


def head(program: Program) -> Op:
    (op,) = (op for op in program.ops if op.kind == "lm_head_ce_grads")
    return op


@pytest.mark.parametrize("targets", ["all-linear", "down_proj", ("q_proj", "v_proj")], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_op_yields_a_gradient_that_nobody_reads(family: str, targets: Any) -> None:
    assembly = adapted(tiny_config(**FAMILIES[family]), lora_target_modules=targets, lora_dropout=0.1)
    for name in ("micro_first", "micro_next"):
        program = assembly.programs[name]
        read = {v for op in program.ops for v in op.ins}
        backward = [op for op in program.ops if op.phase == "backward"]
        dead = [(op, v) for op in (*backward, head(program)) for v in op.outs if v.role == "act" and v not in read]
        assert not dead
        frozen_too = {"embedding_bwd", "linear_bgrad", "rmsnorm_bwd", "qk_norm_rope_bwd"}
        assert not frozen_too & {op.kind for op in program.ops}
    frozen = {v.name for v in assembly.params.values()} - {v.name for v in assembly.trainable}
    assert not [v for v in assembly.declared if v.name.removeprefix("grad.") in frozen and v.role == "grad"]


@pytest.mark.parametrize("family", ["qwen3", "llama tied"])
def test_a_frozen_head_spares_a_third_of_its_work_and_the_bytes_of_its_gradient(family: str) -> None:
    """The head of this vocabulary is where most bytes are live, with its gradient and without."""
    config = tiny_config(**FAMILIES[family], vocab_size=4099)
    assembly = adapted(config)

    def with_gradient(program: Program) -> tuple[Program, Op, Op]:
        without = head(program)
        weight = without.ins[1]
        gradient = Value(name="dw", shape=weight.shape, dtype="fp32", role="act")
        whole = replace(without, outs=(*without.outs, gradient), attrs={**without.attrs, "wrt": (0, 1)})
        return replace(program, ops=tuple(whole if op is without else op for op in program.ops)), without, whole

    for name in ("micro_first", "micro_next"):
        program = assembly.programs[name]
        as_before, without, whole = with_gradient(program)
        flops = OPS["lm_head_ce_grads"].flops
        assert 3 * flops(without) == 2 * flops(whole) == 12 * 32 * 48 * 4099
        scratch = [[OPS[op.kind].workspace(op) for op in p.ops] for p in (program, as_before)]
        bytes_of = [plan(p, w)["device"].arena_bytes for p, w in zip((program, as_before), scratch, strict=True)]
        assert bytes_of[1] - bytes_of[0] == align(4 * 4099 * 48)


def test_a_trained_head_keeps_its_gradient() -> None:
    program = assemble(plan_inputs(tiny_config())).programs["micro_first"]
    assert head(program).attrs["wrt"] == (0, 1) and head(program).outs[2].role == "grad"
