"""Row tiles that a plan chooses: only for long rows, only if the run does not fit otherwise, or is slower."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from surogate import run
from surogate_core.assembly.assemble import sketch
from surogate_core.assembly.assembly import Assembly
from surogate_core.assembly.draft import Draft
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.planning import plan as planning
from surogate_core.planning.plan import Plan, sketch_exactly

ROOT = Path(__file__).parents[2]


def with_blocks(folder: Path, config: str, blocks: int) -> Path:
    """Write the config of a model with `blocks` blocks, for rows of any length."""
    given = json.loads((ROOT / config).read_text(encoding="utf-8"))
    given |= {"max_position_embeddings": 1 << 20, "num_hidden_layers": blocks}
    (folder / "config.json").write_text(json.dumps(given), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_blocks(tmp_path_factory.mktemp("model"), "examples/qwen3-8b/config.json", 12)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_blocks(tmp_path_factory.mktemp("small"), "examples/qwen3-8b/config.json", 3)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_blocks(tmp_path_factory.mktemp("mixture"), "benchmarks/models/qwen3-30b-a3b/config.json", 3)


def planned(model: Path, tokens: int, limit: str, **keys: Any) -> Plan:
    given = {"model": model, "lora": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    given |= {"sequence_len": tokens, "device_memory_limit": limit, **keys}
    loaded = run.load(ROOT / "examples/qwen3-8b.yaml", [f"{key}={value}" for key, value in given.items()])
    return run.plan(loaded, "h200", 1)


def test_a_long_row_that_does_not_fit_gets_tiles_and_fits(model: Path) -> None:
    keys: dict[str, Any] = {"recompute": True, "offload_residual": True}
    without = planned(model, 65_536, "20GiB", row_tiles=0, **keys)
    assert not without.report.fits and without.tiles_line == ""
    chosen = planned(model, 65_536, "20GiB", **keys)
    assert chosen.report.fits and chosen.tiles_line == "row_tiles: 4 tiles of 16,384 of 65,536 rows"
    assert chosen.report.step.seconds < 1.03 * without.report.step.seconds


def test_a_long_row_that_fits_only_in_tiles_with_everything_recomputed_is_found(model: Path) -> None:
    plan = planned(model, 524_288, "85GiB", offload_residual=True)
    assert plan.report.fits and plan.row_tiles == 32_768 and plan.chosen is not None


@pytest.mark.parametrize("rows", [0, 32_768])
def test_tiles_of_rows_that_are_quantized_together_are_the_same_whatever_is_asked_for(model: Path, rows: int) -> None:
    """NVFP4 quantizes parts of a long row, which the plan tells; shorter rows are quantized at once."""
    plan = planned(model, 65_536, "80GiB", recipe="nvfp4", row_tiles=rows)
    assert plan.tiles_line == "row_tiles: 4 tiles of 16,384 of 65,536 rows"
    assert planned(model, 16_384, "80GiB", recipe="nvfp4", row_tiles=rows).row_tiles == 0


def test_tiles_are_not_planned_where_what_blocks_keep_decides(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the forward pass bounds how little a run in tiles needs, and so how much faster it may be."""
    rows: list[int | None] = []
    monkeypatch.setattr(planning, "sketch", lambda given, on: (rows.append(given.row_tiles), sketch(given, on))[1])
    plan = planned(model, 131_072, "100GiB", offload_attention=True)
    assert plan.report.fits and plan.chosen is not None and set(rows) == {None}
    planned(model, 131_072, "24GiB", offload_attention=True)
    assert 16_384 in rows


def test_a_plan_that_was_expected_to_fit_and_does_not_gets_tiles(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"tokens": 524_288, "limit": "85GiB", "offload_residual": True}
    monkeypatch.setattr(planning, "_can_fit", lambda plan: plan.expected.seconds < inf)
    monkeypatch.setattr(planning, "_LITTLE", 1.0)
    assert not planned(model, **keys, row_tiles=0).report.fits
    plan = planned(model, **keys)
    assert plan.report.fits and plan.row_tiles == 32_768


STACKS = "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"
ON_HOST: dict[str, Any] = {"recompute": True, "offload_residual": True}


@pytest.mark.parametrize(
    ("experts", "keys"),
    [
        (False, {}),
        (False, {**ON_HOST, "offload_weights": True, "offload_attention": True}),
        (False, {**ON_HOST, "lora_dropout": 0.1}),
        (False, {**ON_HOST, "lora": False}),
        (False, {**ON_HOST, "recipe": "fp8-hybrid"}),
        (True, {"lora_target_parameters": STACKS}),
        (True, {**ON_HOST, "lora_target_parameters": STACKS, "recipe": "fp8-hybrid"}),
        (True, {**ON_HOST, "lora_target_parameters": STACKS, "qlora_bnb": True}),
    ],
    ids=["kept", "on the host", "dropout", "all weights", "fp8", "experts kept", "experts in fp8", "experts on NF4"],
)
def test_a_sketch_of_three_tiles_has_the_bytes_and_seconds_of_all(
    small: Path, mixture: Path, experts: bool, keys: dict[str, Any]
) -> None:
    """Tiles that are kept apart, as the ends of experts' rows are, count as often as there are such tiles."""
    plan = planned(mixture if experts else small, 140_000, "80GiB", row_tiles=16_384, sample_packing=False, **keys)
    whole = sketch_exactly(plan.inputs, plan.recording)
    three = sketch_exactly(replace(plan.inputs, tiles_stand_in=True), plan.recording)
    assert three.assembly.is_partial and not whole.assembly.is_partial and not plan.assembly.is_partial
    three.verify()
    for name, arena in whole.assembly.memory.arenas.items():
        found = three.assembly.memory.arenas[name]
        assert (found.lower_bound, found.arena_bytes) == (arena.lower_bound, arena.arena_bytes), name
    assert three.report.device_bytes == whole.report.device_bytes
    assert three.report.step.seconds == pytest.approx(whole.report.step.seconds, rel=1e-9)
    ops = [max(len(p.ops) for p in one.assembly.programs.values()) for one in (three, whole)]
    assert ops[0] < 0.5 * ops[1]


def test_a_plan_that_takes_more_than_its_sketch_is_chosen_again_with_all_tiles(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"row_tiles": 16_384, "offload_residual": True}
    expected = planned(small, 131_072, "24GiB", **keys)

    def with_small_sketches(given: PlanInputs, recording: Draft) -> Assembly:
        assembly = sketch(given, recording)
        if not assembly.is_partial:
            return assembly
        arenas = {name: replace(arena, lives=(), lower_bound=0) for name, arena in assembly.memory.arenas.items()}
        return replace(assembly, memory=replace(assembly.memory, arenas=arenas))

    monkeypatch.setattr(planning, "sketch", with_small_sketches)
    plan = planned(small, 131_072, "24GiB", **keys)
    assert expected.chosen is not None and not plan.assembly.is_partial
    assert plan.inputs.recompute_chosen == expected.inputs.recompute_chosen
    assert plan.report.device_bytes == expected.report.device_bytes and plan.report.fits


def test_products_in_fp8_run_in_tiles_and_their_first_step_always_does(model: Path) -> None:
    """Its tensors are scaled by themselves: a long row always in the same parts, so that no plan changes the scales."""
    keys: dict[str, Any] = {"recompute": True, "offload_residual": True, "recipe": "fp8-hybrid"}
    whole, tiled = (planned(model, 65_536, "80GiB", row_tiles=rows, **keys) for rows in (0, 16_384))
    assert tiled.report.device_bytes["total"] < 0.8 * whole.report.device_bytes["total"]
    first, other = (len(plan.assembly.programs["calibrate_first"].ops) for plan in (whole, tiled))
    assert first == other > 2 * len(whole.assembly.programs["micro_first"].ops)


@pytest.mark.parametrize("config", ["llama-3.1-8b", "qwen2.5-7b"])
def test_what_moves_in_front_of_its_first_reader_is_read_behind_it_alone(config: str, tmp_path: Path) -> None:
    """Two ops read the gradient of queries, keys and values, and one of them is itself moved further back."""
    model = with_blocks(tmp_path, f"benchmarks/models/{config}/config.json", 4)
    keys = {"recipe": "fp8-hybrid", "qlora_fp8": True, "recompute": True, "row_tiles": 512}
    assert planned(model, 2048, "80GiB", **keys).tiles_line == "row_tiles: 4 tiles of 512 of 2,048 rows"


def test_long_ops_are_launched_without_graphs(model: Path) -> None:
    """Graphs of a row in tiles take memory for each of its launches, and ops of milliseconds gain nothing by them."""
    assert planned(model, 2_048, "80GiB").gains_by_graphs
    assert not planned(model, 262_144, "80GiB", recompute=True, offload_residual=True).gains_by_graphs


def test_a_row_that_fits_has_no_tiles(model: Path) -> None:
    assert planned(model, 65_536, "130GiB").row_tiles == 0


def test_short_rows_have_none_even_if_nothing_fits(model: Path) -> None:
    plan = planned(model, 4_096, "8GiB", per_device_train_batch_size=16)
    assert not plan.report.fits and plan.row_tiles == 0


@pytest.mark.parametrize(("tokens", "rows"), [(131_072, 16_384), (524_288, 32_768), (300_000, 32_768)])
def test_there_are_at_most_sixteen_and_they_are_whole_blocks_of_sums(model: Path, tokens: int, rows: int) -> None:
    plan = planned(model, tokens, "16GiB", recompute=True, offload_residual=True, sample_packing=False)
    assert plan.row_tiles == rows


def test_more_tiles_than_a_program_may_have_are_refused(model: Path) -> None:
    with pytest.raises(Exception, match=r"row_tiles: 128 divides the 65536 tokens of a micro-step into .* 256 or more"):
        planned(model, 65_536, "80GiB", row_tiles=128)


def test_rows_that_are_no_multiple_are_refused(model: Path) -> None:
    with pytest.raises(Exception, match="row_tiles: 1000 is no multiple of 128; use auto, or 1024"):
        planned(model, 4_096, "80GiB", row_tiles=1000)
