"""The three calls of benchmarks/scaling.py, with tiny models on two ranks of the CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    collectives, compare, scaling, step = (
        importlib.import_module(name) for name in ("collectives", "compare", "scaling", "step")
    )
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

ROWS = {row.name: row for call in scaling.CALLS.values() for row in call.rows}


@pytest.mark.parametrize("name", ["full-qwen2.5-0.5b-zero1", *(row.name for row in scaling.CALLS["b"].rows)])
def test_a_row_trains_on_two_ranks(name: str, tmp_path: Path) -> None:
    """The others differ from rows of test_rows_on_two_gpus.py in sizes alone."""
    write_tiny(ROWS[name].model, tmp_path)
    row = replace(ROWS[name], seq_len=64, batch=1, gpus=2)
    _, *words = compare.words_of("ours", row, compare.parse(["--models", str(tmp_path), "--timed", "0.01"]))
    result = step.measure(step.parse(words), 1)
    assert result["gpus"] == 2 and result["loss"] == pytest.approx(5.55, abs=0.2)


def test_what_ranks_exchange_is_timed_and_counted_as_a_plan_counts_it() -> None:
    found = list(collectives.measure(2, [1, 2]))
    assert [(f["collective"], f["mib"]) for f in found] == [(kind, mib) for kind in collectives.WAYS for mib in (1, 2)]
    for one in found:
        sent = collectives.WAYS[one["collective"]] * one["mib"] * 2**20 / 2
        assert one["gb_per_second"] == pytest.approx(sent / one["ms"] / 1e6, rel=0.05, abs=0.01)
        assert one["planned_gb_per_second"] > 0


def test_a_row_is_planned_for_eight_gpus_and_for_one_without_any(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = scaling.parse(["b", "--plan", "h200", "--gpus", "8"])
    row = replace(ROWS["lora-qwen3-30b-a3b"], gpus=8)
    heading, eight, one = scaling.plans([row], scaling.device("h200"), arguments)
    assert heading.split()[:2] == ["row", "GPUs"] and eight.split()[1] == "8" and one.split()[1] == "1"
    assert float(one.split()[-1]) == pytest.approx(1, abs=0.02) and "does not fit" not in eight


def test_what_misses_a_goal_is_said() -> None:
    ours = {"tokens_per_second": 5000}
    found = {"row": "full-qwen3-8b-zero1", "planned_share": 0.95, "scaling": 0.98, "gpus": 2, "ours": ours}
    assert not list(scaling.missed(found))
    assert list(scaling.missed({**found, "scaling": 0.9})) == ["0.9 reached of 0.975 times so many GPUs"]
    assert list(scaling.missed({**found, "planned_share": 0.9})) == ["planned -10% of the measured time, more than 8%"]
    slow = {**found, "row": "fp8-lora-llama-70b", "scaling": None}
    assert list(scaling.missed(slow)) == ["2,500 reached of 2,700 tokens/s of a GPU"]
    assert not list(scaling.missed({**slow, "planned_share": None})), "an error is a line of its own"
    assert scaling.GOALS.keys() <= ROWS.keys()


@pytest.mark.parametrize("call", ["b", "c"])
def test_a_limit_leaves_no_call_without_words(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", call, "--gpus", "2", "--limit", "0.5"])
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    assert ("failed: lost_ranks.py" if call == "c" else "left no time for fp8-lora-llama-70b, ") in str(ended.value)


def run(*words: str) -> list[dict[str, Any]]:
    """Run a script to its end, and return the lines that it wrote."""
    out = Path(words[-1])
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=out.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_a_call_measures_what_ranks_exchange_and_its_rows_against_plans(tmp_path: Path) -> None:
    code = "import sys, scaling, collectives; sys.argv[0] = 'scaling.py'\n"
    code += "call = scaling.CALLS['a']; rows = [scaling.replace(r, seq_len=64, batch=1) for r in call.rows[2:4]]\n"
    code += "scaling.CALLS = {'a': scaling.Call(call.scripts, rows)}; scaling.main()"
    for model in ("qwen2.5-0.5b", "qwen3-8b"):
        write_tiny(model, tmp_path)
    words = ["a", "--gpus", "2", "--models", str(tmp_path), "--timed", "0.1", "--seconds", "600"]
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
    *exchanged, first, second = run("-c", start + code, *words, "--out", str(tmp_path / "a.jsonl"))
    assert len(exchanged) == len(collectives.WAYS) * len(collectives.MIBS)
    for found in (first, second):
        assert found["scaling"] > 0 and found["planned_share"] > 0 and found["planned_gib"] > 0


@pytest.mark.slow
def test_a_killed_and_a_stopped_rank_end_the_run_which_is_resumed_to_the_bit(tmp_path: Path) -> None:
    words = ["--gpus", "2", "--model", str(ROOT / "examples/tiny-qwen3"), "--set", "model_dtype=fp32", "--stall", "10"]
    script = str(ROOT / "benchmarks/lost_ranks.py")
    whole, killed, stopped = run(script, *words, "--wait", "500", "--out", str(tmp_path / "c.jsonl"))
    assert whole["ranks"] == 2 and "is gone" in killed["said"] and "rank 1" in stopped["said"]
    assert all(found["resumed_at_step_after_seconds"] > 0 for found in (killed, stopped))
