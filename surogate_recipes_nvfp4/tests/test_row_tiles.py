"""NVFP4 on long rows: parts of a row have magnitudes of their own, so tiles change no bit.

A row of 384 tokens stands for a long one, and blocks of 128 rows for those of 16,384.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import recipe_model
import torch
from models.harness import tiny_config
from nvfp4_model import model, ops_of
from recipe_model import Model, differing, lora_rank_8

from surogate_core.api import NoOptions, Program, Target
from surogate_core.assembly.recomputed import Recomputation
from surogate_core.program.passes import sum_in_blocks
from surogate_core.testing.devices import device
from surogate_lora import gradients
from surogate_offload_residual.plugin import surogate_offload_strategies

TOKENS, PART = 384, 128
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96}
CONFIG = tiny_config(**SIZES)
WHOLE = frozenset({"block"})
ATTENTION, RESIDUAL = ((strategy, NoOptions()) for strategy in surogate_offload_strategies())
KINDS: dict[str, dict[str, Any]] = {
    "lora": lora_rank_8(),
    "all weights": {},
    "bf16 gradients": {"request": {"param_grad_dtype": "bf16"}},
}


@pytest.fixture(autouse=True)
def rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MANY_ROWS", PART)
    monkeypatch.setattr(sum_in_blocks, "BLOCK", PART)
    monkeypatch.setattr(sum_in_blocks, "SMALL", 0)
    monkeypatch.setattr(recipe_model, "ROWS", 1)
    monkeypatch.setattr(recipe_model, "LENGTH", TOKENS)


def trained(of: Model) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a step of two micro-steps and of an evaluation, and all params and states after them."""
    losses = [of.step(lr=1e-3), of.evaluate()]
    return losses, of.named("param", "state")


@pytest.fixture(scope="module")
def plain() -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def result(kind: str) -> Any:
        if kind not in known:
            known[kind] = trained(model(CONFIG, **KINDS[kind]))
        return known[kind]

    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "choices",
    [
        {"row_tiles": 128},
        {"row_tiles": 256, "recompute": WHOLE},
        {"recompute": frozenset({"swiglu", "qkv"})},
        {"recompute_chosen": Recomputation(frozenset({"rmsnorm"}), WHOLE, 2)},
        {"row_tiles": 128, "recompute": WHOLE, "offload": [RESIDUAL]},
        {"recompute": WHOLE, "offload": [ATTENTION, RESIDUAL]},
        {"offload": [ATTENTION]},
    ],
    ids=lambda choices: "+".join(choices),
)
def test_tiles_recomputation_and_offloading_change_no_bit(
    kind: str, choices: dict[str, Any], plain: Callable[..., Any]
) -> None:
    losses, values = trained(model(CONFIG, **KINDS[kind], **choices))
    expected_losses, expected = plain(kind)
    assert losses == expected_losses
    assert differing(expected, values) == []


def test_fp4_products_have_the_bits_too() -> None:
    """They read a transposed form of weights."""
    target = {"target": Target(device("b200"))}
    one, other = (trained(model(CONFIG, **lora_rank_8(), **target, recompute=parts)) for parts in (frozenset(), WHOLE))
    assert one[0] == other[0] and differing(one[1], other[1]) == []


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        pytest.param("lora", frozenset(), id="lora"),
        pytest.param("all weights", WHOLE, id="all weights, recomputed"),
    ],
)
def test_a_step_that_reports_its_numerics_has_the_bits_too(kind: str, recompute: frozenset[str]) -> None:
    """It measures parts, and what it reports is of the whole tensor."""
    one, other = (model(CONFIG, **KINDS[kind], recompute=recompute, numerics=True) for _ in range(2))
    one.micro_step(True, 5)
    other.write(5)
    other.view(other.assembly.scalars.micro_step).fill_(5)
    program = other.assembly.micro_step(first=True, last=False, purpose="report")
    largest: dict[int, float] = {}

    def seen(index: int) -> None:
        op = program.ops[index]
        if op.kind == "nvfp4_measure" and op.ins[0].root.label == "swiglu":
            part = float(other.buffers.view(op.ins[0], program.name).abs().max())
            largest[op.block] = max(largest.get(op.block, 0.0), part)

    other.executor.walk(program.name, seen)
    found = [run.named("grad", "state") for run in (one, other)]
    assert differing(*({n: t for n, t in f.items() if n != "nvfp4.numerics"} for f in found)) == []
    assert {op.ins[0].shape[0] for op in ops_of(program, "nvfp4_measure")} == {PART}
    numerics = other.assembly.numerics
    assert numerics is not None
    rows = dict(zip((t.name for t in numerics.tensors), other.view(numerics.values).tolist(), strict=True))
    assert {rows[f"layers.{block}.mlp.down.x"][0] for block in range(4)} == {*largest.values()}
    assert all(0.05 < error < 0.2 for _, error, _ in rows.values())


def parts(program: Program, kind: str) -> set[int]:
    return {op.ins[0].shape[0] for op in ops_of(program, kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_of_a_long_row_has_a_magnitude_of_its_own(kind: str) -> None:
    """Also without row_tiles. Gradients in bf16 are sums of all rows at once, whose operands are one matrix."""
    programs = model(CONFIG, **KINDS[kind]).assembly.programs
    micro = programs["micro_first"]
    assert parts(micro, "nvfp4_quantize") == ({TOKENS} if kind == "bf16 gradients" else {PART})
    assert parts(programs["evaluate"], "nvfp4_quantize") == {PART}
    firsts = {op.attrs.get("row", 0) for op in ops_of(micro, "nvfp4_quantize") if op.attrs.get("stochastic")}
    assert firsts == ({0} if kind == "bf16 gradients" else {0, 128, 256})


@pytest.mark.parametrize("tokens", [PART, TOKENS])
def test_short_rows_are_quantized_at_once(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of as many tokens as a block has, or more of them, also where tiles divide the rest."""
    rows = {"batch_size": tokens // PART, "seq_len": PART}
    tiled = model(CONFIG, row_tiles=128, recompute=WHOLE, **rows).assembly.programs["micro_first"]
    assert parts(tiled, "nvfp4_quantize") == {tokens}
    assert parts(tiled, "add_rmsnorm") == {PART}


def test_rows_whose_number_atoms_of_scales_do_not_divide_are_quantized_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_model, "LENGTH", TOKENS + 32)
    for kind in ("lora", "all weights"):
        runs = [model(CONFIG, **KINDS[kind], recompute=recompute) for recompute in (frozenset(), WHOLE)]
        assert TOKENS + 32 in parts(runs[1].assembly.programs["micro_first"], "nvfp4_quantize")
        one, other = map(trained, runs)
        assert one[0] == other[0] and differing(one[1], other[1]) == []


def test_long_rows_take_less_memory_where_parts_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    def arena(kind: str) -> int:
        wide = tiny_config(**SIZES | {"intermediate_size": 640})
        return model(wide, **KINDS[kind], recompute=WHOLE).assembly.memory.arena_bytes

    divided = {kind: arena(kind) for kind in ("lora", "all weights")}
    monkeypatch.setattr(sum_in_blocks, "BLOCK", TOKENS)
    for kind, size in divided.items():
        assert size < 0.8 * arena(kind)
