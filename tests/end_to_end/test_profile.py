"""`surogate profile`: every op of a step is timed, its figures add up to the step, and the run is left as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace
from typer.testing import CliRunner

from surogate import run
from surogate.cli.app import app
from surogate_core.runtime.worker import Worker
from surogate_profile.batches import fill, random_batch, random_tokens
from surogate_profile.measure import measure
from surogate_profile.picture import draw, parts
from surogate_profile.profiling import profile
from surogate_profile.report import to_json
from surogate_profile.step_profile import StepProfile
from surogate_profile.table import WIDTH, lines


def profiled(workplace: Workplace, *overrides: str, steps: int = 2, **options: Any) -> StepProfile:
    return profile(workplace.write(), overrides, steps=steps, notice=lambda line: None, **options)


# ----------------------------------------------------------------------------------------------------- what is measured


def test_every_op_of_a_step_is_timed_as_often_as_it_runs(here: Workplace) -> None:
    result = profiled(here, "gradient_accumulation_steps=3", use_random_tokens=True)
    programs = run.plan(run.load(here.write(gradient_accumulation_steps=3))).assembly.all_programs
    calls = {(timed.program, timed.index): timed.calls for timed in result.ops}
    ran = {program for program, _ in calls}
    runs = {name: 2 if name.startswith("micro_next") else 1 for name in ran}
    assert sorted(name.partition("@")[0] for name in ran) == ["micro_first", "micro_next", "update"]
    assert calls == {(name, index): runs[name] for name in ran for index in range(len(programs[name].ops))}
    assert all(timed.seconds > 0 for timed in result.ops)


def test_ops_and_gaps_are_the_step_and_kinds_and_programs_are_the_ops(here: Workplace) -> None:
    result = profiled(here)
    assert result.total.seconds + result.gaps == pytest.approx(result.seconds)
    assert result.gaps >= 0  # the loop's own time
    for groups in (result.by_kind(), result.alike(), result.by_program()):
        assert sum(len(group.ops) for group in groups) == len(result.ops)
        assert sum(group.seconds for group in groups) == pytest.approx(result.total.seconds)
    kinds = [group.seconds for group in result.by_kind()]
    assert kinds == sorted(kinds, reverse=True)


def test_work_and_planned_time_are_those_of_the_plan(here: Workplace) -> None:
    """Batches with few documents run variants of the programs, which read a few bytes less of `cu_seqlens`."""
    planned = run.plan(run.load(here.write())).report.step
    total = profiled(here).total
    assert total.flops == planned.flops
    assert total.bytes == pytest.approx(planned.bytes, rel=1e-2)
    assert total.planned_seconds == pytest.approx(planned.seconds, rel=1e-2)


def test_the_tokens_are_the_runs_own_and_random_ones_where_it_has_none(here: Workplace) -> None:
    own = profiled(here)
    assert "of the run's data" in own.batches and own.tokens < 2 * 4 * 64  # rows end in padding
    for result in (profiled(here, use_random_tokens=True), profile(here.write(datasets=None), steps=1)):
        assert result.batches == "2 x 4 x 64 random tokens, one document a row"
        assert result.tokens == 2 * 4 * 64


def test_an_adapter_is_profiled_without_the_weights_of_its_base(here: Workplace) -> None:
    """Its matrices that start at zero are drawn: so no product multiplies zeros."""
    overrides = ("lora=true", "from_scratch=false")
    result = profiled(here, *overrides, use_random_weights=True)
    assert "adapter lora" in result.recipe and "linear_pair" in {group.kind for group in result.by_kind()}
    opened = run.open_run(run.load(here.write(), overrides))
    plan = run.plan(opened)
    worker = run.make_worker(opened, plan)
    assert isinstance(worker, Worker)
    fill(opened, plan.assembly, worker, random=True)
    assert all(bool(worker.buffers.persistent(v).any()) for v in plan.assembly.trainable)


def test_measuring_changes_no_weight_and_blows_up_nothing(here: Workplace) -> None:
    """Also bf16 weights, whose updates are rounded stochastically."""
    loaded = run.load(here.write(), ["model_dtype=bf16", "master_dtype=bf16", "learning_rate=1.0"])
    opened = run.open_run(loaded)
    plan = run.plan(opened)
    worker = run.make_worker(opened, plan)
    assert isinstance(worker, Worker)
    fill(opened, plan.assembly, worker, random=False)
    worker.start()
    before = worker.buffers.segment("param").clone()
    times = measure(worker, random_tokens(plan.inputs, 3).steps)
    assert torch.equal(before, worker.buffers.segment("param"))
    assert len(times.steps) == 3 and times.event_seconds == 0
    assert all(len(calls) == 3 for (name, _), calls in times.ops.items() if name == "update")
    values = [v for v in plan.assembly.declared if v.role in ("grad", "state")]
    assert all(bool(torch.isfinite(worker.buffers.persistent(v).float()).all()) for v in values)


def test_a_random_batch_has_the_documents_and_labels_that_are_asked_for(here: Workplace) -> None:
    opened = run.open_run(run.load(here.write(), ["sample_packing=true"]))
    plan = run.plan(opened)
    whole = random_batch(plan.inputs)
    assert (whole.n_documents, whole.n_valid, whole.n_tokens) == (4, 4 * 63, 4 * 64)
    parted = random_batch(plan.inputs, documents=4, labelled=0.5)
    assert (parted.n_documents, parted.n_valid) == (16, 16 * 8)
    assert parted.positions.max() == 15
    assert (whole.tokens != random_batch(plan.inputs, seed=2).tokens).any()


# ------------------------------------------------------------------------------------------------ table, JSON, picture


def test_the_command_prints_the_table_and_writes_nothing_but_the_named_files(here: Workplace) -> None:
    config = here.write()
    before = {path for path in here.root.iterdir() if path.name not in ("cache", "hf")}
    arguments = ["profile", str(config), "--steps", "2", "--top", "3", "--picture", "p.png"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines()[4:])) <= WIDTH
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    for first in ("kind", "lm_head_ce_grads", "adamw_8bit", "all", "between", "step", "longest"):
        assert first in rows, done.stdout
    after = {path for path in here.root.iterdir() if path.name not in ("cache", "hf")}
    assert after - before == {Path(here.root / "p.png")}
    assert (here.root / "p.png").read_bytes().startswith(b"\x89PNG")


def test_json_holds_every_op_and_sums_that_agree(here: Workplace) -> None:
    result = profiled(here)
    data = json.loads(json.dumps(to_json(result)))
    assert set(data) == {
        *("model", "recipe", "device", "weights", "batches", "method", "event_seconds", "step"),
        *("programs", "kinds", "ops"),
    }
    assert len(data["ops"]) == len(result.ops)
    op = data["ops"][0]
    assert (op["program"].partition("@")[0], op["index"], op["kind"], op["phase"]) == (
        *("micro_first", 0, "embedding", "forward"),
    )
    figures = {"calls", "seconds", "bytes", "flops", "bandwidth_share", "peak_share", "planned_seconds"}
    for rows in (data["ops"], data["kinds"], data["programs"]):
        assert figures <= set(rows[0])
        assert sum(row["seconds"] for row in rows) == pytest.approx(data["step"]["ops_seconds"])
    assert data["step"]["ops_seconds"] + data["step"]["gaps_seconds"] == pytest.approx(data["step"]["seconds"])
    assert len(data["step"]["all_seconds"]) == 2


def test_the_picture_shows_the_whole_step(here: Workplace) -> None:
    result = profiled(here)
    found = parts(result)
    assert [name for name, *_ in found][-2:] == [f"{len(result.by_kind()) - 9} other kinds", "between ops"]
    assert sum(seconds for _, seconds, _ in found) == pytest.approx(result.seconds)
    assert sum(planned for *_, planned in found) == pytest.approx(result.total.planned_seconds)
    assert draw(result).startswith(b"\x89PNG")


def test_no_op_is_listed_with_top_0(here: Workplace) -> None:
    result = profiled(here, steps=1)
    assert not [line for line in lines(result, 0) if line.startswith("longest ops")]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--picture", "step.jpg"], ["--picture: step.jpg", "PNG"]),
        (["--picture", "nowhere/step.png"], ["--picture", "nowhere does not exist"]),
        (["--set", "from_scratch=false"], ["model"]),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(
    here: Workplace, arguments: list[str], words: list[str]
) -> None:
    assert_profile_refused(here, ["--random-tokens", *arguments], words)


def test_a_run_that_does_not_fit_is_refused(here: Workplace) -> None:
    assert_profile_refused(here, ["--set", "per_device_train_batch_size=1000003"], ["GiB", "Change"])


def assert_profile_refused(here: Workplace, arguments: list[str], words: list[str]) -> None:
    """One message on stderr that has `words`, exit code 2, no table."""
    done = CliRunner().invoke(app, ["profile", str(here.write()), *arguments])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ") and all(word in done.stderr for word in words), done.stderr
    assert not done.stdout
