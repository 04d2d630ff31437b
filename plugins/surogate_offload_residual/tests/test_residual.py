"""The residual stream in host memory: same bits, memory that does not grow with the number of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.harness import PlannedModel, plan_inputs, random_documents, tiny_config

from surogate_core.api import ConfigError, NoOptions, Target
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.recomputed import PARTS
from surogate_core.planning.plan import summarise
from surogate_core.testing.devices import device
from surogate_core.testing.programs import initialize, lane_order
from surogate_offload_residual import schedule
from surogate_offload_residual.plugin import surogate_offload_strategies

ATTENTION, RESIDUAL = surogate_offload_strategies()
OFFLOAD: dict[str, Any] = {"offload": [(RESIDUAL, NoOptions())]}
ALL = frozenset(PARTS) - {"pairs"}


def assembly(layers: int, **settings: Any) -> Any:
    config = tiny_config(num_hidden_layers=layers)
    return assemble(plan_inputs(config, target=Target(device("h200")), **settings))


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"rmsnorm"}), ALL], ids=["none", "norms", "all"])
@pytest.mark.parametrize("layers", [4, 6])
def test_gradients_are_bit_identical(layers: int, recompute: frozenset[str]) -> None:
    config = tiny_config(num_hidden_layers=layers)
    plain, moved = (PlannedModel(config, 2, 16, recompute=recompute, **settings) for settings in ({}, OFFLOAD))
    rows = [random_documents([9, 7], config["vocab_size"], seed) for seed in (3, 4)]
    for model in (plain, moved):
        initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    losses = [model.micro_step(rows, 0.1) for model in (plain, moved)]
    assert losses[0] == losses[1]
    assert all(torch.equal(grad, moved.gradients[name]) for name, grad in plain.gradients.items())
    assert any(op.kind == "move" for op in moved.assembly.programs["micro_first"].ops)


def test_outputs_of_attention_on_the_host_are_not_computed_again() -> None:
    config = tiny_config(num_hidden_layers=5)
    rows = [random_documents([9, 7], config["vocab_size"], seed) for seed in (3, 4)]
    both: dict[str, Any] = {"offload": [(ATTENTION, NoOptions()), (RESIDUAL, NoOptions())]}
    plain, moved = (PlannedModel(config, 2, 16, recompute=ALL, **settings) for settings in ({}, both))
    for model in (plain, moved):
        initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    assert plain.micro_step(rows, 0.1) == moved.micro_step(rows, 0.1)
    assert all(torch.equal(grad, moved.gradients[name]) for name, grad in plain.gradients.items())
    counts = [
        sum(op.kind == "attention" for op in model.assembly.programs["micro_first"].ops) for model in (plain, moved)
    ]
    assert counts == [10, 5]
    hosts = {v.label for op in moved.assembly.programs["micro_first"].ops for v in op.outs if v.place == "host"}
    assert {"attention", "lse"} < hosts


def test_with_many_tokens_a_copy_has_one_block_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and one more block whose residual is on the host."""
    config = tiny_config(num_hidden_layers=4)
    rows = [random_documents([9, 7], config["vocab_size"], seed) for seed in (3, 4)]
    two = PlannedModel(config, 2, 16, recompute=ALL, **OFFLOAD)
    monkeypatch.setattr(schedule, "MANY_TOKENS", 31)
    one = PlannedModel(config, 2, 16, recompute=ALL, **OFFLOAD)
    moved = [
        {op.outs[0].block for op in model.assembly.programs["micro_first"].ops if op.lane == "to_host"}
        for model in (two, one)
    ]
    assert moved == [{-1, 1}, {-1, 1, 2}]
    for model in (two, one):
        initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    assert two.micro_step(rows, 0.1) == one.micro_step(rows, 0.1)
    assert all(torch.equal(grad, one.gradients[name]) for name, grad in two.gradients.items())


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_of_which_nothing_is_moved_is_refused(layers: int) -> None:
    with pytest.raises(
        ConfigError, match=f"offload_residual: true: nothing to move, .* of {layers} blocks, .* Remove the key"
    ):
        assembly(layers, **OFFLOAD)


def test_with_recomputed_blocks_the_memory_of_activations_does_not_grow_with_depth() -> None:
    sizes = [assembly(layers, recompute=ALL, **OFFLOAD).memory.arena_bytes for layers in (6, 12, 24)]
    assert sizes[0] == sizes[1] == sizes[2]
    plain = [assembly(layers, recompute=ALL).memory.arena_bytes for layers in (6, 12, 24)]
    assert plain[0] < plain[1] < plain[2]


def test_the_host_holds_what_the_device_does_not() -> None:
    planned = assembly(12, recompute=ALL, **OFFLOAD)
    program = planned.programs["micro_first"]
    hosts = [op.outs[0] for op in program.ops if op.lane == "to_host"]
    assert {value.place for value in hosts} == {"host"} and {value.block for value in hosts} == {-1, *range(1, 10)}
    assert planned.memory.host is not None
    assert planned.memory.host.arena_bytes >= sum(value.nbytes for value in hosts)
    inputs = plan_inputs(tiny_config(num_hidden_layers=12), target=Target(device("h200")), recompute=ALL, **OFFLOAD)
    report = summarise(planned, inputs)
    assert report.host_bytes["activations"] == planned.memory.host.arena_bytes
    assert report.step.copy_seconds > 0


def test_compute_waits_two_blocks_after_a_copy_began() -> None:
    program = assembly(8, recompute=ALL, **OFFLOAD).programs["micro_first"]
    order = lane_order(program.ops)
    for index, op in enumerate(program.ops):
        if op.lane == "to_host":
            waiting = program.ops[order.done[index]]
            between = [o for o in program.ops[index : order.done[index]] if o.kind == "attention"]
            assert waiting.kind == "wait" and len(between) >= 1
