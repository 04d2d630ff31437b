"""What a warm-up on a GPU runs of a mixture. Needs no GPU."""

from __future__ import annotations

import pytest
from models.harness import plan_inputs, tiny_config

from surogate_core.assembly.assemble import assemble
from surogate_core.runtime.cuda import always_warmed_up

MIXTURE = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 3}


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"block"})], ids=["kept", "recomputed"])
def test_a_warm_up_writes_all_rows_of_experts_that_products_address_memory_by(recompute: frozenset[str]) -> None:
    """Else a product reads garbage: an op of the same signature has run, but wrote another value."""
    config = tiny_config(**MIXTURE)
    assembly = assemble(plan_inputs(config, batch_size=2, seq_len=32, max_documents=4, recompute=recompute))
    ops = [op for program in assembly.programs.values() for op in program.ops]
    made = {out: op for op in ops for out in op.outs}
    addresses = {v for op in ops if op.kind.startswith("grouped_") for v in op.ins if v.dtype == "int32"}
    assert len(addresses) >= 2 and all(always_warmed_up(made[v]) for v in addresses)
    assert any(op.kind.startswith("grouped_") and not always_warmed_up(op) for op in ops)
