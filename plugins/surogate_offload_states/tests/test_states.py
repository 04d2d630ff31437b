"""Optimizer states, masters and weights in host memory: same bits, and few blocks on the device at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import settings
from fp8_model import Model
from models.harness import PlannedModel, plan_inputs, random_documents, tiny_config, valid_tokens
from torch import Tensor

from surogate.reporting.program_listing import listing
from surogate_core.api import ConfigError, PrecisionRequest, Target
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.planning.report import summarise
from surogate_core.testing.devices import device
from surogate_core.testing.programs import initialize, lane_order
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_offload_residual.plugin import surogate_offload_strategies as residual_strategies
from surogate_offload_states import selection
from surogate_offload_states.plugin import surogate_offload_strategies
from surogate_optim_adamw.adamw import ADAMW_OP
from surogate_qlora_fp8.format import FP8, Fp8WeightOptions

CONFIG = tiny_config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=5, head_dim=8)
ROWS = [[document] for document in random_documents([16, 11], CONFIG["vocab_size"])]
SCALE = 1 / valid_tokens([document for row in ROWS for document in row])
STRATEGIES = {strategy.name: strategy for strategy in (*residual_strategies(), *surogate_offload_strategies())}
MASTERS = PrecisionRequest(model_dtype="bf16", master_dtype="fp32")
BF16 = PrecisionRequest(model_dtype="bf16", param_grad_dtype="bf16", optimizer_state_dtype="bf16")


@pytest.fixture(autouse=True)
def hold_small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SMALLEST_BYTES", 0)


def offload(**chosen: Any) -> dict[str, Any]:
    """Return the settings of a run with these strategies, each with the value of its key."""
    strategies = [(STRATEGIES[name], value) for name, value in chosen.items()]
    return {"offload": [(s, s.options.model_validate({f"offload_{s.name}": value})) for s, value in strategies]}


def trained(**given: Any) -> dict[str, Tensor]:
    """Return the bits of params, gradients and states after two steps of two micro-steps."""
    model = PlannedModel(CONFIG, 2, 16, weight_decay=0.1, max_grad_norm=1.0, **given)
    initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    model.executor.run("start")
    for step in (1, 2):
        for first in (True, False):
            model.micro_step(ROWS, SCALE / 2, first=first)
        model.update(step, lr=1e-2)
    kept = [v for v in model.assembly.declared if v.role in ("param", "grad", "state") and "streamed" not in v.name]
    return {v.name: model.buffers.persistent(v).clone().reshape(-1).view(torch.uint8) for v in kept}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, bits in one.items() if not torch.equal(bits, other[name])] == []


PARTS = ("swiglu", "rmsnorm", "qkv")
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"attn_bwd_chunks": 2},
    "zero copy": {"zero_copy": True},
}
NEEDS = {"zero copy": {"grads", "master", "optimizer", "weights"}}
"""One of these strategies must be chosen too."""
ARRAY = settings([*(name for name in STRATEGIES if name not in ("quants", "embedding")), *PARTS, *MODES], whole=())


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    return trained(request=MASTERS)


@pytest.mark.parametrize("chosen", ARRAY, ids=["-".join(sorted(row)) for row in ARRAY])
def test_every_combination_computes_the_same_bits(chosen: frozenset[str], plain: dict[str, Tensor]) -> None:
    """A pairwise covering array of strategies and recomputed parts (the seed is `covering.SEED`), and all at once."""
    held = offload(**dict.fromkeys(sorted(chosen & STRATEGIES.keys()), True))
    for mode in sorted(chosen & MODES.keys()):
        if mode not in NEEDS or NEEDS[mode] & chosen:
            held |= MODES[mode]
    assert_same_bits(plain, trained(request=MASTERS, recompute=chosen.intersection(PARTS), **held))


def test_weights_that_are_their_own_masters_are_updated_in_host_memory() -> None:
    held = trained(request=BF16, **offload(optimizer=True, weights=True))
    assert_same_bits(trained(request=BF16), held)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_weights_of_some_blocks_are_held_in_host_memory(count: int) -> None:
    assembly = planned(12, weights=count)
    blocks = sorted({v.block for v in assembly.declared if v.place == "host"})
    assert len(blocks) == count
    assert max(b - a for a, b in zip([-1, *blocks], [*blocks, 12], strict=True)) <= 12 / count


def test_frozen_weights_under_an_adapter_are_held_in_host_memory() -> None:
    lora: dict[str, Any] = {"adapters": [(LORA, LoraOptions(lora_rank=4))]}
    assert_same_bits(trained(**lora), trained(**lora, **offload(weights=3)))


def test_a_frozen_embedding_is_read_in_host_memory_row_by_row() -> None:
    lora: dict[str, Any] = {"adapters": [(LORA, LoraOptions(lora_rank=4))], "zero_copy": "auto"}
    assert_same_bits(trained(**lora), trained(**lora, **offload(embedding=True)))
    plain, held = (
        plan_inputs(tiny_config(vocab_size=50_000), target=Target(device("h200")), **lora, **chosen)
        for chosen in ({}, offload(embedding=True))
    )
    on_device, on_host = (summarise(assemble(given), given) for given in (plain, held))
    saved = on_device.device_bytes["total"] - on_host.device_bytes["total"]
    assert saved == on_host.host_bytes["weights"] >= 50_000 * tiny_config()["hidden_size"] * 4
    assert on_host.step.copy_seconds < saved / device("h200").host_bandwidth / 10


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_quantized_weights_are_held_in_host_memory(lora: bool) -> None:
    adapters: dict[str, Any] = {"adapters": [(LORA, LoraOptions(lora_rank=4))]} if lora else {}
    models = [Model(**adapters, **held) for held in ({}, offload(quants=True))]
    assert any(v.place == "host" and v.derived for v in models[1].assembly.declared)
    results = []
    for model in models:
        for _ in range(3):
            model.step()
        results.append(model.named("param", "grad", "state"))
    assert_same_bits(*results)


def planned(layers: int, **chosen: Any) -> Assembly:
    return assemble(inputs(layers, **chosen))


def inputs(layers: int, vocab_size: int = 97, adapters: Any = (), **chosen: Any) -> Any:
    config = tiny_config(num_hidden_layers=layers, vocab_size=vocab_size)
    given = {"target": Target(device("h200")), "request": MASTERS, "adapters": adapters}
    return plan_inputs(config, **given, **offload(**chosen))


@pytest.mark.parametrize("name", ["optimizer", "master", "weights"])
def test_the_memory_on_the_device_does_not_grow_with_depth(name: str) -> None:
    """That of the values which the strategy holds on the host, and of the copies of them."""
    memory = [planned(layers, **{name: True}).memory for layers in (6, 12)]
    plain = [planned(layers).memory for layers in (6, 12)]
    role = "param" if name == "weights" else "state"
    assert all(m.host is not None for m in memory)
    saved = [p.segments[role].nbytes - m.segments[role].nbytes for p, m in zip(plain, memory, strict=True)]
    on_host = [m.host.segments[role].nbytes for m in memory if m.host is not None]
    assert saved == on_host and on_host[1] > 1.5 * on_host[0]
    update = [m.arenas["update"].arena_bytes for m in memory]
    assert update[0] == update[1]


def test_at_most_three_blocks_are_on_the_device() -> None:
    program = planned(8, optimizer=True, weights=True).programs["update"]
    order, checked = lane_order(program.ops), 0
    for index, op in enumerate(program.ops):
        if op.lane == "to_device" and op.block >= 3:
            before = [o for i, o in enumerate(program.ops[:index]) if o.lane == "to_host" and order.done[i] <= index]
            assert {o.block for o in before} >= set(range(op.block - 2))
            checked += 1
    assert checked > 40


def test_the_same_run_has_the_same_copies_in_the_same_order() -> None:
    """Gradients that one op adds to are fetched in the order of its outputs, not in that of their addresses."""
    lora: dict[str, Any] = {"adapters": [(LORA, LoraOptions(lora_rank=4))]}
    first, *others = ({listing(p) for p in planned(8, grads=True, **lora).programs.values()} for _ in range(4))
    assert all(other == first for other in others)


def test_the_report_names_what_the_host_holds() -> None:
    given = inputs(4, optimizer=True, weights=True)
    assembly = assemble(given)
    report = summarise(assembly, given)
    assert assembly.memory.host is not None
    host = assembly.memory.host.segments
    assert report.host_bytes["weights"] == host["param"].nbytes > 0
    assert report.host_bytes["optimizer"] == host["state"].nbytes > 0
    assert report.step.copy_seconds > 0


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"master": True}, "no master weights besides the weights"),
        ({"quants": True}, "keeps no quantized weights.*fp8-hybrid, or store frozen weights quantized .qlora_bnb, "),
    ],
)
def test_a_strategy_without_anything_to_hold_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble(plan_inputs(CONFIG, **offload(**chosen)))


@pytest.mark.parametrize(
    ("lora", "tied", "message"),
    [(False, False, "this run trains the embedding"), (True, True, "the LM head of this model is its embedding")],
)
def test_an_embedding_of_which_more_than_rows_is_used_is_refused(lora: bool, tied: bool, message: str) -> None:
    adapters = [(LORA, LoraOptions(lora_rank=4))] if lora else []
    config = tiny_config(tie_word_embeddings=tied)
    with pytest.raises(ConfigError, match=f"offload_embedding: true: {message}"):
        assemble(plan_inputs(config, adapters=adapters, **offload(embedding=True)))


def test_weights_that_are_read_in_another_form_alone_are_the_matter_of_another_key() -> None:
    """Micro-steps also read the norms of blocks, which no strategy holds."""
    qlora = {"adapters": [(LORA, LoraOptions(lora_rank=4))], "weight_format": (FP8, Fp8WeightOptions(qlora_fp8=True))}
    with pytest.raises(ConfigError, match="read no matrices of blocks, but quantized copies of them"):
        assemble(plan_inputs(CONFIG, **qlora, **offload(weights=True)))


def test_zero_copy_needs_no_memory_for_copies_and_takes_the_link_as_long() -> None:
    plain, staged, direct = (
        inputs(4, **chosen) for chosen in ({}, {"optimizer": True, "master": True}, {"optimizer": True, "master": True})
    )
    direct = replace(direct, zero_copy=True)
    assemblies = [assemble(given) for given in (plain, staged, direct)]
    updates = [assembly.programs["update"] for assembly in assemblies]
    assert "move" in {op.kind for op in updates[1].ops}
    assert "move" not in {op.kind for op in updates[2].ops}
    arenas = [assembly.memory.arenas["update"].arena_bytes for assembly in assemblies]
    assert arenas[2] <= arenas[0] < arenas[1]
    held = {v for op in updates[2].ops for v in (*op.ins, *op.outs) if v.place == "host"}
    reports = [summarise(assembly, given) for assembly, given in zip(assemblies, (plain, staged, direct), strict=True)]
    link = sum(v.nbytes for v in held) / device("h200").host_bandwidth / ADAMW_OP.zero_copy
    assert reports[0].step.copy_seconds == 0
    assert reports[2].step.copy_seconds == pytest.approx(link)
    assert reports[2].step.waiting_seconds > 0.5 * link


def test_zero_copy_of_what_is_outside_of_blocks_saves_memory_and_time() -> None:
    """The states of the embedding and the LM head, whose copies nothing hides, stay on the host."""
    copied = inputs(4, vocab_size=100_000, optimizer=True)
    given = [copied, replace(copied, zero_copy="auto"), replace(copied, zero_copy=True)]
    assemblies = [assemble(one) for one in given]
    updates = [assembly.programs["update"] for assembly in assemblies]
    moved = [{op.block for op in update.ops if op.kind == "move"} for update in updates]
    assert moved == [{-1, 0, 1, 2, 3}, {0, 1, 2, 3}, set()]
    direct = {op.block for op in updates[1].ops if op.kind == "adamw" and any(v.place == "host" for v in op.ins)}
    assert direct == {-1}
    costs = [summarise(assembly, one).step.seconds for assembly, one in zip(assemblies, given, strict=True)]
    assert costs[1] < costs[0]
    arenas = [assembly.memory.arenas["update"].arena_bytes for assembly in assemblies]
    assert arenas[2] <= arenas[1] < arenas[0]


def test_zero_copy_of_what_is_outside_of_blocks_computes_the_same_bits() -> None:
    held = trained(request=MASTERS, **offload(optimizer=True, master=True, grads=True), zero_copy="auto")
    assert_same_bits(trained(request=MASTERS), held)


def test_values_of_ops_that_are_slow_over_the_link_are_copied() -> None:
    slow = replace(inputs(2, optimizer=True), zero_copy="auto")
    slow = replace(slow, ops={**slow.ops, "adamw": replace(ADAMW_OP, zero_copy=0.4)})
    assert -1 in {op.block for op in assemble(slow).programs["update"].ops if op.kind == "move"}


def test_values_of_ops_without_zero_copy_are_copied() -> None:
    """The FP8 recipe quantizes trained weights after their update, by an op that cannot write host memory."""
    model = Model(**offload(quants=True, optimizer=True), zero_copy=True)
    update = model.assembly.programs["update"]
    copied = {v for op in update.ops for v in op.outs if op.kind == "move" and v.place == "host"}
    direct = {v for op in update.ops for v in op.outs if op.kind == "adamw" and v.place == "host"}
    assert copied and all(v.derived for v in copied)
    assert direct and not any(v.derived for v in direct)


def test_zero_copy_without_anything_on_the_host_is_refused() -> None:
    for chosen in ({}, offload(residual=True)):
        with pytest.raises(ConfigError, match=r"use_zero_copy: true: optimizer adamw uses nothing that the host holds"):
            assemble(plan_inputs(CONFIG, **chosen, zero_copy=True))


def test_a_config_that_offloads_can_be_tried_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small values stay on the device where others are large. Where all are small, the host holds them as asked."""
    monkeypatch.setattr(selection, "SMALLEST_BYTES", 1 << 30)
    for chosen in ({"optimizer": True}, {"weights": True}, {"grads": True}):
        host = assemble(inputs(2, **chosen)).memory.host
        assert host is not None and host.nbytes > 0


def test_quantized_weights_of_a_tiny_model_are_held_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SMALLEST_BYTES", 1 << 30)
    qlora = {"adapters": [(LORA, LoraOptions(lora_rank=4))], "weight_format": (FP8, Fp8WeightOptions(qlora_fp8=True))}
    memory = assemble(plan_inputs(CONFIG, **qlora, **offload(quants=True))).memory
    assert memory.host is not None and memory.host.nbytes > 0
