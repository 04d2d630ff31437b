"""The addresses that kernels are bound to are those of the views that everything else reads."""

from __future__ import annotations

import pytest
from models.harness import plan_inputs, tiny_config

from surogate_core.assembly.assemble import assemble
from surogate_core.program.shards import Sharding
from surogate_core.runtime.arena import Buffers

CONFIG = tiny_config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("weights", [False, True])
def test_every_value_of_a_divided_run_is_bound_where_its_view_begins(rank: int, weights: bool) -> None:
    sharding = Sharding(parts=3, states=True, gradients=True, weights=weights)
    assembly = assemble(plan_inputs(CONFIG, world_size=3, sharding=sharding, grad_accum_steps=2))
    buffers = Buffers(assembly.memory, rank=rank)
    seen = 0
    for name, program in assembly.all_programs.items():
        for value in {v for op in program.ops for v in (*op.ins, *op.outs)}:
            assert buffers.address(value, name) == buffers.view(value, name).data_ptr(), (name, value)
            seen += value.shard is not None
    assert seen > 20, "parts begin inside of whole values"
