"""`surogate plan --longest`: the longest row that fits, for each way to train."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from surogate import run
from surogate.cli.longest import print_longest, to_json
from surogate.fitting.longest import _FIRST, _Rows, longest_of
from surogate_core.machine.devices import GIB

ROOT = Path(__file__).parents[2]
CONFIG = json.loads((ROOT / "examples/qwen3-8b/config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": 4}


def opened(folder: Path, *, scaling: dict[str, Any] | None = None, **keys: Any) -> run.Run:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": scaling}), encoding="utf-8")
    return run.open_run(run.load({"model": str(folder), "sequence_len": 64, **keys}))


def test_the_row_fits_and_the_next_of_the_grid_does_not(tmp_path: Path) -> None:
    given = opened(tmp_path, lora=True, device_memory_limit="24GiB")
    found = longest_of(given, run.plan(given, "h100"))
    assert found.limited_by == "device" and found.tokens > CONFIG["max_position_embeddings"] and found.proposal
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": found.scaling}), encoding="utf-8")
    keys = {"model": str(tmp_path), "lora": True, "device_memory_limit": "24GiB", **found.proposal.changes}
    exact = run.plan(run.load(keys), "h100")
    assert exact.report.fits and exact.report.device_bytes == found.proposal.plan.report.device_bytes
    scaled = {"rope_scaling": {**(found.scaling or {}), "factor": 64.0}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | scaled), encoding="utf-8")
    assert not run.plan(run.load(keys | {"sequence_len": found.tokens + 16_384}), "h100").report.fits


@pytest.mark.slow
def test_the_host_limits_too_and_strategies_that_fill_it_for_little_are_turned_off(tmp_path: Path) -> None:
    given = opened(tmp_path, lora=True, device_memory_limit="24GiB", host_memory_limit="3GiB")
    found = longest_of(given, run.plan(given, "h100"))
    assert found.tokens and found.proposal and found.proposal.plan.report.pinned_bytes <= 3 * GIB
    free = opened(tmp_path, lora=True, device_memory_limit="24GiB")
    more = longest_of(free, run.plan(free, "h100"))
    assert more.tokens > found.tokens


def test_no_other_choice_of_what_the_host_holds_makes_rows_longer(tmp_path: Path) -> None:
    given = opened(tmp_path, lora=True, device_memory_limit="16GiB", host_memory_limit="3GiB")
    plan = run.plan(given, "h100")
    found = longest_of(given, plan).tokens
    rows = _Rows(given, plan, 1, 1 << 24)
    choices = [(0, len(axis.settings) - 1) if len(axis.settings) > 1 else (0,) for axis in rows._axes]
    every = {held: rows._search(held, _FIRST)[0] for held in product(*choices)}
    assert len(every) == 16 and min(every.values()) < found / 2
    assert found == max(every.values())


def test_a_model_whose_positions_no_scaling_extends_is_the_limit(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64, "original_max_position_embeddings": 4096}
    given = opened(tmp_path, lora=True, scaling={"rope_type": "longrope", **factors})
    found = longest_of(given, run.plan(given, "h200"))
    assert (found.tokens, found.limited_by, found.scaling) == (40_960, "model", None)


def test_the_table_has_each_way_and_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = opened(tmp_path, device_memory_limit="6GiB")
    found = run.longest(given.loaded, "h100")
    print_longest(found, "--device h100")
    printed = capsys.readouterr().out
    for way in ("LoRA, bf16 base", "LoRA, 8-bit base", "LoRA, 4-bit base", "all weights"):
        assert way in printed
    assert "  lora: true\n" in printed and "  qlora_bnb: true\n" in printed
    assert json.loads(json.dumps([to_json(row) for row in found.rows]))[0]["limited_by"] == "device"


def test_where_nothing_fits_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run.longest(opened(tmp_path, device_memory_limit="800MiB").loaded, "h100")
    print_longest(found, "--device h100")
    assert "none" in (printed := capsys.readouterr().out) and "Nothing fits: use a smaller model" in printed
