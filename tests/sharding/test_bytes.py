"""The bytes that a rank sends in a step: those of gradients and weights, as often as the level says, and no others."""

from __future__ import annotations

import pytest
from models.harness import plan_inputs, tiny_config
from sharding.test_equal import EVERY, optimizer

from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.program.passes.reduce import micro_step_counts
from surogate_core.program.shards import Sharding, is_divisible, part_size

RANKS, LAYERS = 4, 3
CONFIG = tiny_config(num_hidden_layers=LAYERS)


def planned(steps: int, name: str, *, gradients: bool = False, weights: bool = False) -> Assembly:
    sharding = Sharding(parts=RANKS, states=True, gradients=gradients, weights=weights)
    given = {"world_size": RANKS, "grad_accum_steps": steps, "sharding": sharding, **optimizer(name)}
    return assemble(plan_inputs(CONFIG, ops=EVERY, **given))


def sent(assembly: Assembly, steps: int) -> int:
    """Return the bytes that a rank sends in a step, but those of the norm and of what all ranks hold."""
    counts = {assembly.only("update"): 1}
    for kind, count in micro_step_counts(steps, RANKS).items():
        counts[assembly.micro_step(first=kind.first, last=kind.last)] = count
    moved = ("reduce_scatter", "all_gather", "reduce", "broadcast")
    return sum(
        EVERY[op.kind].link(op) * count
        for program, count in counts.items()
        for op in program.ops
        if op.kind in moved and op.ins[0].label != "square_sums"
    )


def part_bytes(assembly: Assembly, block: int) -> int:
    """Return (N - 1) / N of the bytes of the matrices of a block in fp32, of equal parts with padding."""
    owned = {v.name.removeprefix("normuon.momentum.") for v in assembly.declared if v.owner is not None}
    matrices = [v for v in assembly.declared if v.role == "param" and v.block == block and is_divisible(v.shape, RANKS)]
    assert {v.name for v in matrices} <= owned or not owned or block < 0
    parts = [v.size // RANKS if v.name in owned else part_size(v.size, RANKS) for v in matrices]
    return 4 * (RANKS - 1) * sum(parts)


@pytest.mark.parametrize("name", ["adamw", "normuon"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_level_sends_gradients_and_weights_as_often_as_it_says(steps: int, name: str) -> None:
    """Also where a rank owns whole matrices."""
    whole = planned(1, name)
    blocks, outside = part_bytes(whole, 0) * LAYERS, part_bytes(whole, -1)
    last = part_bytes(whole, LAYERS - 1)
    every = blocks + outside
    assert sent(planned(steps, name), steps) == every + every
    assert sent(planned(steps, name, gradients=True), steps) == steps * every + every
    gathered = steps * (2 * blocks - last + outside)  # the backward pass begins with what the forward pass ended with
    assert sent(planned(steps, name, weights=True), steps) == every + gathered
    assert sent(planned(steps, name, gradients=True, weights=True), steps) == steps * every + gathered
