"""Drawn runs have the programs, the planned bytes and the losses that `recorded.json` holds.

Programs and bytes are equal on every machine. The bits of losses depend on the processor and on torch: they are
compared where both are those that made the file, and elsewhere up to what rounding does to a few steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unchanged.draw import DrawnRun, draw
from unchanged.record import (
    FILE,
    LARGE,
    SEARCHED,
    large_plan,
    losses,
    prepare,
    processor_and_torch,
    search,
    tiny_plan,
)

from surogate.world import watch

RECORDED: dict[str, Any] = json.loads(FILE.read_text())
RUNS = draw()
ROUNDING = 0.06
"""Largest relative difference of a loss on another processor, where a bit of a sum moves a rounding to 4 or 8 bits:
twice what was found without vector instructions."""
QUICK = ("8B", "8B on 24 GB", "8B, FP8, level 3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("unchanged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.delenv("SUROGATE_PLUGINS", raising=False)
        patch.setattr(watch, "GRACE_SECONDS", 600.0)  # a run that fails must not end the process of the test
        prepare(place)
        yield place


def marked(run: DrawnRun, quick: bool) -> Any:
    return pytest.param(run, id=run.name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("run", [marked(run, run.quick) for run in RUNS])
def test_a_run_has_the_programs_after_every_pass_and_the_bytes_that_it_had(run: DrawnRun, folder: Path) -> None:
    found, recorded = tiny_plan(run, folder), RECORDED["runs"][run.name]
    changed = {
        name: f"{passes} instead of {recorded['programs'].get(name)}"
        for name, passes in found.get("programs", {}).items()
        if passes != recorded.get("programs", {}).get(name)
    }
    assert changed == {}, "look at the first pass of a program that differs: surogate plan --diff PASS"
    assert found == recorded


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LARGE])
def test_a_published_model_has_the_plan_that_it_had(name: str, folder: Path) -> None:
    assert large_plan(name, folder) == RECORDED["large"][name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_proposes_what_it_proposed(name: str, folder: Path) -> None:
    assert json.loads(json.dumps(search(name, folder))) == RECORDED["searches"][name]


@pytest.mark.parametrize("run", [marked(r, r.ranks == 1) for r in RUNS if r.name in RECORDED["losses"]])
def test_a_run_has_the_losses_that_it_had(run: DrawnRun, folder: Path) -> None:
    found, recorded = losses(run, folder), RECORDED["losses"][run.name]
    if processor_and_torch() == RECORDED["processor and torch"]:
        assert found == recorded
    else:
        assert found == pytest.approx(recorded, rel=ROUNDING)


def test_every_run_that_is_drawn_is_recorded_and_most_are_not_refused() -> None:
    assert [run.name for run in RUNS] == [*RECORDED["runs"]]
    assert sum("refused" not in plan for plan in RECORDED["runs"].values()) >= 60
    assert (RECORDED["large"].keys(), RECORDED["searches"].keys()) == (LARGE.keys(), SEARCHED.keys())
