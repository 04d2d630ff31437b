"""Weights of experts that are decoded a few at a time: bits, memory that is not complete yet, and who stays whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.harness import OPS, PlannedModel, random_documents, tiny_config
from torch import Tensor

from surogate_core.api import PrecisionRequest
from surogate_core.program.value import UNFINISHED_LABEL
from surogate_core.testing.programs import initialize
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_qlora_mxfp4.format import MXFP4
from surogate_qlora_mxfp4.options import Mxfp4WeightOptions
from surogate_qlora_mxfp4.reference import quantized

EXPERTS, WIDTH = 6, 64
CONFIG = tiny_config(
    model_type="gpt_oss",
    hidden_size=WIDTH,
    intermediate_size=WIDTH,
    num_hidden_layers=2,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    sliding_window=6,
    layer_types=["sliding_attention", "full_attention"],
)
GATE_UP = 2 * 2 * WIDTH * WIDTH
"""Bytes of a matrix of an expert in bf16."""
ROWS = [random_documents([20, 11], CONFIG["vocab_size"], 5)]


def planned(most: int, **settings: Any) -> PlannedModel:
    """Return LoRA of experts on MXFP4, in memory whose dead values are NaN."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    given: dict[str, Any] = {
        "adapters": [(LORA, LoraOptions(lora_rank=2, lora_target_parameters=targets))],
        "weight_format": (MXFP4, Mxfp4WeightOptions(qlora_mxfp4=True)),
        "request": PrecisionRequest(model_dtype="bf16"),
    }
    return PlannedModel(CONFIG, 1, 32, **given | settings, decoded_experts=most)


def trained(model: PlannedModel) -> tuple[Any, Mapping[str, Tensor]]:
    """Return the loss of a micro-step, and the gradients."""
    assembly, view = model.assembly, model.buffers.persistent
    initialize((v for v in assembly.declared if v.init and v.role != "param"), view, seed=3)
    initialize(assembly.params.values(), view, seed=3)
    for index, value in enumerate(assembly.trainable):
        view(value).normal_(0, 0.1, generator=torch.Generator().manual_seed(index))
    for index, (codes, scales, *_) in enumerate(assembly.stored.values()):
        drawn = torch.randn(codes.shape[0], 2 * codes.shape[1], generator=torch.Generator().manual_seed(index))
        for state, content in zip((codes, scales), quantized(0.1 * drawn), strict=True):
            view(state).copy_(content)
    loss = model.micro_step(ROWS, 0.1, first=True)
    return loss, {v.name: view(v).clone() for v in assembly.declared if v.role == "grad"}


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"block"})], ids=["kept", "recomputed"])
@pytest.mark.parametrize("at_a_time", [1, 2, 4])
def test_losses_and_gradients_have_the_bits_of_all_at_once(at_a_time: int, recompute: frozenset[str]) -> None:
    whole, some = (planned(most, recompute=recompute) for most in (0, at_a_time * GATE_UP))
    (loss, grads), (other, others) = trained(whole), trained(some)
    assert loss == other and loss > 0 and grads.keys() == others.keys()
    assert all(torch.equal(grad, others[name]) and grad.isfinite().all() for name, grad in grads.items())
    ops = some.assembly.programs["micro_first"].ops
    firsts = {op.attrs["first"] for op in ops if op.kind == "grouped_linear_part" and op.outs[0].shape[1] == 2 * WIDTH}
    assert firsts == set(range(0, EXPERTS, at_a_time if at_a_time < 4 else 3))


def test_what_is_not_complete_is_marked_and_written_in_one_place() -> None:
    program = planned(GATE_UP).assembly.programs["micro_first"]
    unfinished = [v for op in program.ops for v in op.outs if v.label == UNFINISHED_LABEL]
    parts = [op for op in program.ops if op.kind.endswith("_part")]
    assert len(unfinished) == len(parts) and all(op.in_place == {0: 0} for op in parts)
    known = {v for op in program.ops if op.kind == "unwritten" for v in op.outs}
    for op in parts:
        assert op.ins[0] in known
        known.add(op.outs[0])


def test_a_weight_that_another_op_reads_too_stays_whole() -> None:
    """As one of a family whose ops know nothing of groups."""
    ops = {kind: replace(d, group_wise=lambda op: None) if "dgrad" in kind else d for kind, d in OPS.items()}
    some = planned(GATE_UP, ops=ops).assembly.programs["micro_first"].ops
    assert not [op for op in some if op.kind.startswith("grouped_linear_dgrad") and op.kind.endswith("_part")]
    assert [op for op in some if op.kind == "grouped_linear_part"]
