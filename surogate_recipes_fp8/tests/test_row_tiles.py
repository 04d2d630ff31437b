"""FP8 on long rows: in the first step parts of a row have scales of their own, and dw is summed tile by tile.

A row of 384 tokens stands for a long one, and blocks of 128 rows for those of 16,384.
"""

from __future__ import annotations

from typing import Any

import pytest
import recipe_model
import torch
from fp8_model import BIASED, CONFIG, Model, differing, operands_under_bf16
from models.harness import tiny_config

from surogate_core.api import Target
from surogate_core.program.passes import sum_in_blocks
from surogate_core.testing.devices import device

TOKENS, PART = 384, 128
WHOLE = frozenset({"block"})
EXPERTS = tiny_config(
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    **{"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3, "head_dim": 16},
)
SETTINGS: dict[str, dict[str, Any]] = {
    "transposed": {"target": Target(device("h100"))},
    "not transposed": {"target": Target(device("b200"))},
    "biases": {"config": BIASED, "target": Target(device("h100"))},
    "experts": {"config": EXPERTS, "target": Target(device("h100"))},
}


@pytest.fixture(autouse=True)
def rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_in_blocks, "BLOCK", PART)
    monkeypatch.setattr(recipe_model, "ROWS", 1)
    monkeypatch.setattr(recipe_model, "LENGTH", TOKENS)


def model(settings: dict[str, Any], **changes: Any) -> Model:
    given = settings | changes
    return Model(given.pop("config", CONFIG), **given)


def quantized(run: Model, program: str) -> set[int]:
    """The tokens that are quantized at once: of experts a row for each of two."""
    ops = run.assembly.programs[program].ops
    rows = {(op.ins[0].shape[0], "weighted" in op.kind) for op in ops if "scaling" in op.attrs}
    return {count // 2 if of_experts else count for count, of_experts in rows}


def gradients_of_a_step(run: Model) -> dict[str, torch.Tensor]:
    for index in range(2):
        run.micro_step(index == 0, index)
    return run.gradients()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_first_step_has_the_same_bits_in_every_plan(settings: dict[str, Any]) -> None:
    """It has no scales yet: each part is scaled by itself, whatever is divided or recomputed besides."""
    plain = model(settings)
    assert plain.calibrating and quantized(plain, "calibrate_first") == {PART}
    expected, loss = gradients_of_a_step(plain), float(plain.view(plain.assembly.loss))
    for changes in ({"row_tiles": 128, "recompute": WHOLE}, {"recompute": frozenset({"swiglu", "qkv", "rmsnorm"})}):
        run = model(settings, **changes)
        found = gradients_of_a_step(run)
        assert float(run.view(run.assembly.loss)) == loss
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
        assert differing(plain.named("state"), run.named("state")) == []


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("rows", [128, 256])
def test_later_steps_have_the_losses_and_the_gradients_but_for_the_order_of_sums(
    rows: int, settings: dict[str, Any]
) -> None:
    plain, tiled = model(settings), model(settings, row_tiles=rows, recompute=WHOLE)
    for run in (plain, tiled):
        run.step(lr=1e-3)
    assert differing(plain.named("param", "state"), tiled.named("param", "state")) == []
    assert not plain.calibrating
    assert quantized(plain, "micro_first") == {TOKENS} and rows in quantized(tiled, "micro_first")
    expected, found = gradients_of_a_step(plain), gradients_of_a_step(tiled)
    assert float(plain.view(plain.assembly.loss)) == float(tiled.view(tiled.assembly.loss))
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max() + 1e-30)), name
    states = [{n: s for n, s in run.named("state").items() if n.startswith("fp8.")} for run in (plain, tiled)]
    assert differing(*states) == []


def test_operands_in_fp8_without_a_history_are_scaled_in_parts_in_every_step() -> None:
    settings = operands_under_bf16() | {"target": Target(device("h100"))}
    plain, tiled = model(settings), model(settings, row_tiles=256, recompute=WHOLE)
    assert quantized(plain, "micro_first") == quantized(tiled, "micro_first") == {PART}
    losses = [[run.step(lr=1e-3) for _ in range(2)] for run in (plain, tiled)]
    assert losses[0] == losses[1]
    assert differing(plain.named("param", "state"), tiled.named("param", "state")) == []


def test_bf16_gradients_are_of_all_rows_at_once() -> None:
    """Each tile would round them. So what they are made of is scaled as a whole, in every plan."""
    settings = SETTINGS["transposed"] | {"request": {"param_grad_dtype": "bf16"}}
    plain, tiled = model(settings), model(settings, row_tiles=128, recompute=WHOLE)
    assert TOKENS in quantized(plain, "calibrate_first") & quantized(tiled, "calibrate_first")
    losses = [[run.step(lr=1e-3) for _ in range(2)] for run in (plain, tiled)]
    assert losses[0] == losses[1]
    assert differing(plain.named("param", "state"), tiled.named("param", "state")) == []


def test_long_rows_take_less_memory() -> None:
    wide = tiny_config(vocab_size=64, hidden_size=48, intermediate_size=640, num_hidden_layers=3, head_dim=16)

    def arena(**changes: Any) -> int:
        run = Model(wide, **SETTINGS["transposed"], recompute=WHOLE, **changes)
        return run.assembly.memory.arena_bytes

    tiled = arena(row_tiles=128)
    short = arena(batch_size=3, seq_len=PART)
    assert tiled < 0.8 * short
