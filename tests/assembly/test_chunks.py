"""Chunks of ops that take much workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from models.harness import OPS, plan_inputs, tiny_config

from surogate_core.api import PrecisionRequest, Target
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import device
from surogate_recipes_bf16.kernels.attention import CUDNN

CONFIG = tiny_config(head_dim=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2)


def chunked(chunks: int, **given: Any) -> Assembly:
    """Return the plan of 4 rows on an H200."""
    sizes = {"batch_size": 4, "seq_len": 1024, "max_documents": 64, "target": Target(device("h200"))}
    request = PrecisionRequest(model_dtype="bf16")
    return assemble(plan_inputs(CONFIG, **sizes, attn_bwd_chunks=chunks, request=request, **given))


def test_every_attention_backward_of_a_micro_step_has_chunks_and_nothing_else_has() -> None:
    for chunks in (1, 2, 4):
        programs = chunked(chunks).all_programs
        found = {op.kind: op.attrs.get("chunks") for p in programs.values() for op in p.ops if p.stage == "micro"}
        assert found["attention_bwd"] == (chunks if chunks > 1 else None)
        assert found["attention"] is None


def test_the_workspace_shrinks_with_the_chunks() -> None:
    _, backward = CUDNN
    target = Target(device("h200"))
    needed = []
    for chunks in (1, 2, 4):
        program = chunked(chunks).programs["micro_first"]
        needed.append(backward.workspace(next(op for op in program.ops if op.kind == "attention_bwd"), target))
    assert needed[0] > needed[1] > needed[2]


def test_chunks_that_no_op_takes_are_refused() -> None:
    whole = {kind: replace(definition, takes_chunks=False) for kind, definition in OPS.items()}
    with pytest.raises(ConfigError, match=r"attn_bwd_chunks: 2: model qwen3 has no attention whose backward pass"):
        chunked(2, ops=whole)
