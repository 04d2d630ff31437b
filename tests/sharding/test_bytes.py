"""The bytes that a rank sends in a step: those of gradients and weights, as often as the level says, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from models.harness import plan_inputs, tiny_config
from sharding.test_equal import EVERY, optimizer

from surogate_core.api import PrecisionRequest
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.program.passes.reduce import micro_step_counts
from surogate_core.program.shards import Sharding, is_divisible, part_size
from surogate_recipes_fp8.recipe import FP8_HYBRID, Fp8Options

RANKS, LAYERS = 4, 3
CONFIG = tiny_config(num_hidden_layers=LAYERS)


def planned(
    steps: int, name: str = "adamw", *, gradients: bool = False, weights: bool = False, **more: Any
) -> Assembly:
    sharding = Sharding(parts=RANKS, states=True, gradients=gradients, weights=weights)
    given = {"world_size": RANKS, "grad_accum_steps": steps, "sharding": sharding, **optimizer(name), **more}
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


def part_bytes(assembly: Assembly, block: int, nbytes: int = 4) -> int:
    """Return (N - 1) / N of the bytes of the matrices of a block in fp32, or in elements of `nbytes`.

    Of equal parts these have padding.
    """
    owned = {v.name.removeprefix("normuon.momentum.") for v in assembly.declared if v.owner is not None}
    matrices = [v for v in assembly.declared if v.role == "param" and v.block == block and is_divisible(v.shape, RANKS)]
    assert {v.name for v in matrices} <= owned or not owned or block < 0
    parts = [v.size // RANKS if v.name in owned else part_size(v.size, RANKS) for v in matrices]
    return nbytes * (RANKS - 1) * sum(parts)


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


@pytest.mark.parametrize("steps", [1, 3])
def test_fp8_sends_weights_of_blocks_as_codes_of_one_byte(steps: int) -> None:
    """Also from the update, which combines the largest magnitudes: one fp32 of each weight, once a step."""
    options = Fp8Options.model_validate({})
    fp8: dict[str, Any] = {"recipe": FP8_HYBRID, "recipe_options": options}
    fp8["precision"] = FP8_HYBRID.precision(PrecisionRequest(), options)
    whole = planned(1, **fp8)
    gradients = part_bytes(whole, 0) * LAYERS + part_bytes(whole, -1)
    blocks, outside = part_bytes(whole, 0, 1) * LAYERS, part_bytes(whole, -1, 2)
    last = part_bytes(whole, LAYERS - 1, 1)
    assert sent(planned(steps, **fp8), steps) == gradients + blocks + outside
    divided = planned(steps, gradients=True, weights=True, **fp8)
    assert sent(divided, steps) == steps * gradients + steps * (2 * blocks - last + outside)
    (maxima,) = (op for op in divided.only("update").ops if op.kind == "all_reduce")
    matrices = [v for v in whole.declared if v.role == "param" and v.block >= 0 and len(v.shape) == 2]
    assert EVERY["all_reduce"].link(maxima) == 2 * (RANKS - 1) * 4 * len(matrices) // RANKS
