"""The rows of benchmarks/rows.py on two GPUs, with tiny models on two ranks of the CPU: what a lent machine is for is
measuring alone."""

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

from surogate_core.errors import ConfigError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    compare, rows, step = (importlib.import_module(name) for name in ("compare", "rows", "step"))
finally:
    sys.path.remove(str(BENCHMARKS))

ROWS = {row.name: row for row in rows.ROWS if row.gpus == 2}
KINDS = {
    "two-full-qwen3-8b-zero3": "full",
    "two-full-qwen3-14b": "full",
    "two-lora-qwen3-8b": "PEFT",
    "two-nf4-lora-llama-70b": "PEFT",
    "two-lora-qwen3-30b-a3b": "PEFT",
    "two-dpo-qwen3-8b": "PEFT",
    "two-full-qwen3.5-9b": "full",
    "two-lora-llama-8b-128k": "PEFT",
}
"""Rows whose other side differs by more than sizes -> whose layers it has."""


def small(name: str, folder: Path) -> Any:
    write_tiny(ROWS[name].model, folder, blocks=4 if ROWS[name].long else 2)
    return replace(ROWS[name], seq_len=64, batch=1)


def arguments(folder: Path, *words: str) -> Any:
    return compare.parse(["--models", str(folder), "--timed", "0.01", *words])


def test_the_rows_that_buyers_of_two_cards_ask_for_are_there() -> None:
    models = {row.model for row in ROWS.values()}
    assert models >= {f"qwen3-{size}" for size in ("0.6b", "8b", "14b", "32b", "30b-a3b")}
    assert models >= {"llama-3.1-70b", "qwen3.5-9b", "qwen2.5-0.5b"}
    assert {row.zero_level for row in ROWS.values() if row.model == "qwen3-8b" and not row.lora} == {2, 3}
    assert {row.seq_len for row in ROWS.values()} >= {2048, 4096, 131072} and any(row.dpo for row in ROWS.values())


@pytest.mark.parametrize("name", ROWS)
def test_our_side_of_a_row_trains_on_two_ranks(name: str, tmp_path: Path) -> None:
    row = small(name, tmp_path)
    script, *words = compare.words_of("ours", row, arguments(tmp_path))
    result = step.measure(step.parse(words), 1)
    assert script.endswith("step.py") and result["gpus"] == 2
    assert result["loss"] == pytest.approx(0.69 if row.dpo else 5.55, abs=0.2)  # log 2, and of the vocabulary
    tokens = 2 * row.accumulate * 64
    assert result["tokens_per_second"] == round(tokens / result["step_ms"] * 1000)
    assert len(result["all_ms"]) == 1 if row.long else len(result["all_ms"]) >= 3


def test_one_gpu_is_measured_once_for_all_levels_and_rows_without_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def measure(words: list[str], seconds: float, read: object) -> dict[str, Any]:
        calls.append(words)
        gpus = int(words[words.index("--gpus") + 1])
        rate = {1: 100, 2: 190}[gpus] if words[1].endswith("/step.py") else 160
        figures = {"planned_ms": 9.0, "step_ms": 10.0, "planned_bytes": 3 << 30, "gpu": "a GPU"}
        return {"tokens_per_second": rate, "window": [0, 1], **figures}

    monkeypatch.setattr(compare, "measure_side", measure)
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["compare.py", "two-full-qwen3-8b-*", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    first, second = map(json.loads, out.read_text().splitlines())
    assert ended.value.code is None and len(calls) == 5
    assert first["scaling"] == second["scaling"] == 0.95 and first["ratio"] == round(190 / 160, 4)
    assert first["planned_gib"] == 3 and first["planned_share"] == 0.9
    assert [words[words.index("--zero-level") + 1] for words in calls if "--zero-level" in words] == ["3", "2"]
    assert {len(line) for line in capsys.readouterr().out.splitlines() if "two-full" in line} == {len(compare.HEADINGS)}
    monkeypatch.setattr(sys, "argv", ["compare.py", "two-full-qwen3-8b-*", "--limit", "1"])
    with pytest.raises(SystemExit, match="left no time for two-full-qwen3-8b-zero3, two-full-qwen3-8b-zero2"):
        compare.main()
    assert len(calls) == 5


def test_what_does_not_fit_is_said_instead_of_run(tmp_path: Path) -> None:
    _, *words = compare.words_of("ours", small("two-full-qwen3-8b-zero3", tmp_path), arguments(tmp_path))
    with pytest.raises(SystemExit, match=r"^step.py: does not fit 2 x .*: .* GiB planned on each, which has 0.0$"):
        step.measure(step.parse([*words, "--set", "device_memory_limit=20MiB"]), 1)


def test_documents_that_have_no_partner_are_refused(tmp_path: Path) -> None:
    _, *words = compare.words_of("ours", small("two-dpo-qwen3-8b", tmp_path), arguments(tmp_path))
    words[words.index("--documents") + 1] = "1"
    with pytest.raises(ConfigError, match="1 documents in a micro-batch: loss dpo compares 2 at a time"):
        step.measure(step.parse(words), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), KINDS.items())
def test_the_other_side_of_a_row_trains_on_two_ranks(name: str, layers: str, tmp_path: Path) -> None:
    words = compare.words_of("torch", small(name, tmp_path), arguments(tmp_path))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["layers"] == layers and result["gpus"] == 2
    assert result["loss"] == pytest.approx(0.69 if ROWS[name].dpo else 5.55, abs=0.3)
