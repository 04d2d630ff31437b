"""Row tiles that a plan chooses: only for long rows, only if the run does not fit otherwise, or is slower."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from surogate import run
from surogate_core.assembly.assemble import sketch
from surogate_core.planning import plan as planning
from surogate_core.planning.plan import Plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B with 12 blocks, for rows of any length."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((ROOT / "examples/qwen3-8b/config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": 1 << 20, "num_hidden_layers": 12}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


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


def test_products_in_fp8_run_in_tiles_and_their_first_step_always_does(model: Path) -> None:
    """Its tensors are scaled by themselves: a long row always in the same parts, so that no plan changes the scales."""
    keys: dict[str, Any] = {"recompute": True, "offload_residual": True, "recipe": "fp8-hybrid"}
    whole, tiled = (planned(model, 65_536, "80GiB", row_tiles=rows, **keys) for rows in (0, 16_384))
    assert tiled.report.device_bytes["total"] < 0.8 * whole.report.device_bytes["total"]
    first, other = (len(plan.assembly.programs["calibrate_first"].ops) for plan in (whole, tiled))
    assert first == other > 2 * len(whole.assembly.programs["micro_first"].ops)


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
