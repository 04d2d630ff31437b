"""Numerics reports of a run: what is recorded and shown, and that training is the same with and without them."""

from __future__ import annotations

from typing import Any

import pytest
from end_to_end.product import Workplace, invoke, records

FP8 = {"recipe": "fp8-hybrid", "model_dtype": None, "max_steps": 6, "eval_steps": 0}
COLUMNS = ["amax", "range", "clipped", "lost", "age"]


def numbers(workplace: Workplace) -> list[tuple[Any, ...]]:
    return [(r["step"], r["loss"], r["norm"]) for r in records(workplace.out, "step")]


@pytest.mark.slow
def test_reports_are_recorded_and_shown_and_change_no_bit(here: Workplace) -> None:
    run = invoke("train", here.write(**FP8))
    assert run.returncode == 0, run.stderr
    plain = numbers(here)
    every_second = here.write(**FP8, numerics_report_steps=2, overwrite_output_dir=True)
    run = invoke("train", every_second)
    assert run.returncode == 0, run.stderr
    assert numbers(here) == plain

    reports = records(here.out, "numerics")
    assert [r["step"] for r in reports] == [2, 4, 6]
    assert all(r["columns"] == COLUMNS and len(r["tensors"]) == 3 * 4 * 2 for r in reports)
    assert all(len(row) == len(COLUMNS) for r in reports for row in r["tensors"].values())
    lines = run.stdout.splitlines()
    start = lines.index("numerics at step 4: largest figure, and its block")
    assert lines[start + 1].split() == COLUMNS
    assert {line.split()[0] for line in lines[start + 2 : start + 14]} >= {"mlp.down.x", "attn.o.dy"}
    assert max(map(len, lines[start : start + 14])) <= 80

    resumed = here.write(**FP8 | {"save_steps": 3}, overwrite_output_dir=True)
    assert invoke("train", resumed).returncode == 0
    again = here.write(**FP8, resume_from_checkpoint=3, numerics_report_steps=1)
    run = invoke("train", again)
    assert run.returncode == 0, run.stderr
    assert "not bit-identical" not in run.stdout + run.stderr
    assert numbers(here) == plain and [r["step"] for r in records(here.out, "numerics")] == [4, 5, 6]


def test_the_first_step_calibrates_and_has_no_report(here: Workplace) -> None:
    run = invoke("train", here.write(**FP8 | {"max_steps": 2}, numerics_report_steps=1))
    assert run.returncode == 0, run.stderr
    assert [r["step"] for r in records(here.out, "numerics")] == [2]


def test_a_recipe_without_a_report_refuses_the_key(here: Workplace) -> None:
    run = invoke("plan", here.write(recipe="bf16", model_dtype=None, numerics_report_steps=10))
    assert run.returncode == 2
    assert "numerics_report_steps: bf16 has no numerics report. Leave it out" in run.stderr


def test_products_of_four_bits_report_the_error_of_every_operand(here: Workplace) -> None:
    run = invoke("train", here.write(recipe="nvfp4", model_dtype=None, max_steps=2, numerics_report_steps=1))
    assert run.returncode == 0, run.stderr
    last = records(here.out, "numerics")[-1]
    assert {name.rpartition(".")[2] for name in last["tensors"]} == {"x", "dy"}
    error = last["columns"].index("error")
    assert all(0.05 < row[error] < 0.3 for row in last["tensors"].values())
