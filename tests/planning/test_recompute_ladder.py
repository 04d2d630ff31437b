"""`recompute: auto`: the prices of its ladder are those of real plans, and it takes the cheapest level that fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from models.harness import tiny_config

from surogate import run
from surogate.cli.plan_text import plan_text
from surogate.runs.plan_json import to_json
from surogate.training import start as training
from surogate_core.api import Program, Value
from surogate_core.assembly.assemble import sketch
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.assembly.recomputed import CHOICES, Recomputation
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import GIB, device
from surogate_core.memory.alignment import align
from surogate_core.planning import plan as plan_module
from surogate_core.planning.plan import Plan
from surogate_core.planning.recompute_ladder import RecomputeLevel, first_that_fits, ladder

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 512, "head_dim": 64}
RUNS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "lora": {"lora": True},
    "lora with dropout": {"lora": True, "lora_dropout": 0.1},
    "fp8": {"recipe": "fp8-hybrid", "skip_quant_first_layers": 1},
    "fp8 lora": {"recipe": "fp8-hybrid", "lora": True, "lora_dropout": 0.0},
    "norms anyway": {"recompute_rmsnorm": True},
}
Make = Callable[..., Plan]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run of a small model: key=value ... -> its YAML file."""

    def write(**keys: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config(max_position_embeddings=1024, **SIZES)))
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps({"model": str(tmp_path), "sequence_len": 1024, "model_dtype": "bf16"} | keys))
        return path

    return write


@pytest.fixture
def plan(config: Callable[..., Path]) -> Make:
    return lambda where="h200", **keys: run.plan(run.load(config(**keys)), where)


def kept_bytes(program: Program) -> int:
    """Return the bytes of the blocks' values that the forward pass writes and the backward pass reads."""
    written = {v for op in program.ops if op.phase == "forward" and op.block >= 0 for v in op.outs if v.role == "act"}
    kept: set[Value] = {v for op in program.ops if op.phase != "forward" for v in op.ins} & written
    return sum(align(v.nbytes) for v in kept)


def as_given(plan: Plan, recomputation: Recomputation) -> Plan:
    return plan_module.sketch_exactly(replace(plan.inputs, recompute_chosen=recomputation))


# ---------------------------------------------------------------------------------------------------------- the ladder


@pytest.mark.parametrize("name", RUNS)
def test_a_level_keeps_fewer_bytes_than_the_one_below_at_a_price_that_rises(plan: Make, name: str) -> None:
    before = plan(**RUNS[name])
    levels = ladder(before.recording, before.inputs)
    assert levels[0].recomputation == Recomputation(before.inputs.recompute)
    steps = list(pairwise(levels))
    assert len(steps) >= 2 * SIZES["num_hidden_layers"]
    assert all(above.kept < below.kept and above.seconds >= below.seconds for below, above in steps)
    whole = [level for level in levels if not level.recomputation.count]
    prices = [(b.seconds - a.seconds) / (a.kept - b.kept) for a, b in pairwise(whole)]
    assert prices == sorted(prices)
    assert all(before.inputs.recompute <= level.recomputation.parts for level in levels)


@pytest.mark.parametrize("name", RUNS)
def test_the_price_of_a_level_is_that_of_its_plan(plan: Make, name: str) -> None:
    """Blocks are priced apart from one another, without planning: bytes to the byte, seconds to their roundings."""
    before = plan(**RUNS[name])
    levels = ladder(before.recording, before.inputs)
    for level in Random(name).sample(levels, 3):
        after = as_given(before, level.recomputation)
        assert kept_bytes(after.assembly.programs["micro_first"]) == level.kept, level
        added = after.report.step.seconds - before.report.step.seconds
        assert added == pytest.approx(level.seconds - levels[0].seconds, rel=1e-6, abs=1e-12), level


def test_a_ladder_without_a_better_choice_has_one_level(plan: Make) -> None:
    before = plan(recompute_block=True)
    assert len(ladder(before.recording, before.inputs)) == 1


# --------------------------------------------------------------------------------------------------------- the search


def levels_of(kept: Sequence[int]) -> list[RecomputeLevel]:
    return [RecomputeLevel(Recomputation(), nbytes, float(index)) for index, nbytes in enumerate(kept)]


@pytest.mark.parametrize("seed", range(50))
def test_the_search_finds_the_lowest_level_that_fits_in_few_plans(seed: int) -> None:
    """Sizes follow the estimate but for a noise of less than a level, as packing makes it."""
    random = Random(seed)
    kept = sorted((random.randrange(10**9) for _ in range(random.randint(2, 300))), reverse=True)
    noise = [random.uniform(0, 1e5) for _ in kept]
    sizes = sorted((10**8 + k + n for k, n in zip(kept, noise, strict=True)), reverse=True)
    room = random.uniform(sizes[-1], sizes[0])
    tried: list[int] = []

    def missing_at(index: int) -> int:
        tried.append(index)
        return int(sizes[index] - room)

    index = first_that_fits(levels_of(kept), int(sizes[0] - room), missing_at)
    assert index in tried and sizes[index] <= room + 1
    assert len(tried) <= 4
    assert index - next(i for i, size in enumerate(sizes) if size <= room + 1) <= 1


def test_the_search_ends_at_the_last_level_if_none_fits() -> None:
    tried: list[int] = []
    assert first_that_fits(levels_of([5, 4, 3, 2]), 9, lambda index: tried.append(index) or 7) == 3
    assert tried == [3]


def test_the_search_ends_when_plans_contradict_the_estimate() -> None:
    """Each plan saves less than was estimated: after a few, the last level is tried."""
    tried: list[int] = []
    kept = list(range(1000, 0, -1))
    index = first_that_fits(levels_of(kept), 10, lambda index: tried.append(index) or (10 if index < 999 else -1))
    assert index == 999 and index in tried and len(tried) < 12


@pytest.mark.parametrize("cliff", [400, 777, 998])
def test_where_levels_free_nothing_up_to_one_the_search_halves_what_is_left(cliff: int) -> None:
    tried: list[int] = []
    kept = list(range(1000, 0, -1))
    index = first_that_fits(levels_of(kept), 10, lambda index: tried.append(index) or (10 if index < cliff else -1))
    assert cliff <= index <= cliff + 1000 // 2**3 and index in tried and len(tried) <= 2 + 1 + 3


def test_the_search_tries_the_last_level_early_and_ends_if_it_does_not_fit() -> None:
    tried: list[int] = []
    assert first_that_fits(levels_of(range(1000, 0, -1)), 10, lambda index: tried.append(index) or 10) == 999
    assert len(tried) == 3 and tried[-1] == 999


# ------------------------------------------------------------------------------------------------------------ the plan


def test_a_run_that_fits_is_planned_once_and_recomputes_nothing(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PlanInputs] = []
    monkeypatch.setattr(plan_module, "sketch", lambda given, recording: made.append(given) or sketch(given, recording))
    planned = plan()
    assert planned.report.fits and planned.chosen is None and len(made) == 1
    assert not any(op.phase == "recompute" for p in planned.assembly.programs.values() for op in p.ops)
    assert planned.report == plan(recompute=False).report


SLOW = {"lora with dropout", "fp8", "fp8 lora"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RUNS])
def test_no_set_of_keys_that_fits_is_cheaper_than_the_choice(plan: Make, name: str) -> None:
    """Nor another level. The run is given 40 % of what recomputation can save."""
    kept, least = plan(recompute=False, **RUNS[name]), plan(recompute=True, **RUNS[name])
    sizes = [p.report.device_bytes["total"] for p in (kept, least)]
    limit = int(0.6 * sizes[0] + 0.4 * sizes[1])
    found = plan(device_memory_limit=limit, **RUNS[name])
    assert found.report.fits and found.report.device_bytes["total"] <= limit and found.chosen is not None
    assert found.chosen.saves == sizes[0] - found.report.device_bytes["total"]
    assert found.chosen.costs == found.report.step.seconds - kept.report.step.seconds > 0
    for parts in CHOICES:
        other = as_given(kept, Recomputation(kept.inputs.recompute | parts))
        cheaper = other.report.step.seconds < found.report.step.seconds
        assert not cheaper or other.report.device_bytes["total"] > limit, sorted(parts)
    levels = ladder(kept.recording, kept.inputs)
    at = next(i for i, level in enumerate(levels) if level.recomputation == found.inputs.recompute_chosen)
    below = as_given(kept, levels[at - 1].recomputation)
    assert below.report.device_bytes["total"] > limit


def test_the_choice_is_the_same_every_time(plan: Make) -> None:
    limit = plan(recompute=False).report.device_bytes["total"] - (16 << 20)
    choices = [plan(device_memory_limit=limit).chosen for _ in range(2)]
    assert choices[0] is not None and choices[0] == choices[1]


def test_parts_whose_key_is_true_are_recomputed_in_every_block_whatever_is_chosen(plan: Make) -> None:
    limit = plan(recompute=False, recompute_att=True).report.device_bytes["total"] - (8 << 20)
    found = plan(device_memory_limit=limit, recompute_att=True)
    assert found.chosen is not None
    recomputed = found.chosen.recomputation
    assert "att" in recomputed.parts and (not recomputed.count or "att" in recomputed.first)


def test_without_auto_nothing_is_chosen(plan: Make) -> None:
    for word in (True, False):
        found = plan(device_memory_limit="1GiB", recompute=word, per_device_train_batch_size=8)
        assert found.chosen is None and not found.report.fits


def test_a_run_that_does_not_fit_is_planned_with_everything_recomputed(plan: Make) -> None:
    found = plan(device_memory_limit="800MiB", lora=True)
    assert not found.report.fits and found.chosen is not None
    assert found.chosen.recomputation == Recomputation(frozenset({"adapter"}))
    assert found.report.device_bytes == plan(recompute=True, lora=True).report.device_bytes
    assert "auto chose block, lora in all 6 blocks" in str(found.chosen)


def test_a_run_whose_evaluation_does_not_fit_is_planned_with_the_last_level_alone(
    plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = plan().assembly.memory
    without = plan().report.device_bytes["total"] - memory.arena_bytes
    limit = without + memory.arenas["evaluate"].arena_bytes
    made: list[PlanInputs] = []
    monkeypatch.setattr(plan_module, "sketch", lambda given, recording: made.append(given) or sketch(given, recording))
    monkeypatch.setattr(plan_module, "first_that_fits", lambda *given: pytest.fail("the search of a level"))
    found = plan(device_memory_limit=limit - 1)
    assert not found.report.fits and len(made) == 2
    assert found.report == plan(device_memory_limit=limit - 1, recompute=True).report


def test_a_plan_that_recomputation_does_not_make_smaller_stays_as_it_is(
    plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "ladder", lambda assembly, inputs: levels_of([9, 5]))
    found = plan(device_memory_limit="800MiB")
    assert not found.report.fits and found.chosen is None


def test_on_a_cpu_only_a_limit_makes_auto_choose(plan: Make) -> None:
    alone = plan("cpu")
    assert alone.chosen is None and not alone.inputs.recompute_more
    limit = alone.report.device_bytes["total"] - (8 << 20)
    found = plan("cpu", device_memory_limit=limit)
    assert found.report.fits and found.chosen is not None


# ----------------------------------------------------------------------------------------------------------- the limit


def test_a_limit_is_the_memory_of_the_device_for_the_plan(plan: Make) -> None:
    limited = plan(device_memory_limit="24GiB")
    assert limited.report.device.memory_bytes == limited.target.device.memory_bytes == 24 * GIB
    assert limited.report.device.title == device("h200").title
    assert limited.report.device_bytes == plan().report.device_bytes


def test_a_limit_above_the_devices_memory_is_refused(plan: Make) -> None:
    with pytest.raises(ConfigError, match=r"device_memory_limit: 24.00 GiB is more than the 23.50 GiB of .* RTX 4090"):
        plan("rtx4090", device_memory_limit="24GiB")
    with pytest.raises(ConfigError, match=r"device_memory_limit: .* is more than"):
        plan("cpu", device_memory_limit="1000TiB")


def test_a_run_above_the_limit_is_refused_with_suggestions(config: Callable[..., Path]) -> None:
    opened = run.open_run(run.load(config(device_memory_limit="800MiB")))
    with pytest.raises(
        ConfigError,
        match=r"needs \d\.\d GiB with everything recomputed, more than the 0\.8 of .*\(device_memory_limit\)",
    ):
        training.refuse_unless_it_fits(opened, run.plan(opened, "h200"))


def test_text_and_json_show_limit_choice_and_price(config: Callable[..., Path], plan: Make) -> None:
    limit = plan(recompute=False).report.device_bytes["total"] - (16 << 20)
    opened = run.open_run(run.load(config(device_memory_limit=limit)))
    found = run.plan(opened, "h200")
    assert found.chosen is not None
    text = "\n".join(plan_text(opened, found, "--device h200", ""))
    assert "(--device h200, by device_memory_limit)" in text
    assert str(found.chosen) in " ".join(text.split())
    shown = to_json(found, "train", "")["recompute"]
    assert shown["saves"] == found.chosen.saves and shown["seconds"] == found.chosen.costs
    assert shown["parts"] == sorted(found.chosen.recomputation.parts)
    assert to_json(plan(), "train", "")["recompute"] is None


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (Recomputation(frozenset({"ffn", "swiglu", "rmsnorm"})), "ffn, rmsnorm in all 4 blocks"),
        (Recomputation(frozenset(), frozenset({"rmsnorm"}), 1), "rmsnorm in the first block of 4"),
        (Recomputation(frozenset({"qkv"}), frozenset({"att"}), 2), "att in the first 2 blocks of 4, qkv in the others"),
        (Recomputation(frozenset({"adapter", "qkv"})), "block, lora in all 4 blocks"),
    ],
)  # fmt: skip
def test_a_choice_is_told_in_the_words_of_the_keys(chosen: Recomputation, text: str) -> None:
    assert chosen.text(4) == text


def test_the_last_level_is_not_planned_while_others_free_enough() -> None:
    """Each level frees half of what was estimated, one of them nothing: the last is far from being needed."""
    tried: list[int] = []

    def missing_at(index: int) -> int:
        tried.append(index)
        return 20 - max(0, index - 11) // 2

    index = first_that_fits(levels_of(range(1000, 0, -1)), 20, missing_at)
    assert missing_at(index) <= 0 and 999 not in tried and len(tried) < 9
