"""The planned time of a step is within 10 % of the time that was measured, on a CPU within a half.

`step_times.json` holds the measured times of the rows of benchmarks/rows.py, and tables of benchmarks/h200.md and
h100.md those of benchmarks/promise.py, with the plans. When kernels become faster, measure the rows again (`python
benchmarks/compare.py`) and adjust the constants of the estimate to the new times, never to single models: rates and
launches in `machine/devices.py`, attention in `machine/prices.py`, shares of the bandwidth in the kernels
(`KernelDef.memory_efficiency`), passes of ops in `standard_ops/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surogate.config.load import load_config
from surogate.runs.plan import plan_run
from surogate.runs.run import open_run
from surogate_core.machine.devices import device
from surogate_core.plugins.discovery import load_registry

MEASURED = json.loads((Path(__file__).parent / "step_times.json").read_text())
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


STEP_MS = [(card, name, ms) for card, rows in MEASURED["step_ms"].items() for name, ms in rows.items()]


@pytest.mark.parametrize(("card", "name", "measured_ms"), STEP_MS, ids=str)
def test_a_published_row_fits_and_its_planned_time_is_within_a_tenth_of_the_measured(
    card: str, name: str, measured_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from rows import MODELS, ROWS

    (row,) = [row for row in ROWS if row.name == name]
    raw: dict[str, Any] = {
        "model": str(MODELS / row.model),
        "from_scratch": not row.lora,
        "lora": row.lora,
        "sequence_len": row.seq_len,
        "per_device_train_batch_size": row.batch,
        "gradient_accumulation_steps": row.accumulate,
        "sample_packing": False,
        "recompute": False,
        **dict(setting.split("=", 1) for setting in row.settings),
    }
    registry = load_registry()
    loaded = load_config(raw, registry=registry, source=name)
    plan = plan_run(open_run(loaded, registry), device(card), 1)
    assert plan.report.fits
    planned_ms = plan.report.step.seconds * 1000
    assert planned_ms == pytest.approx(measured_ms, rel=0.1)


def _promised(card: str) -> list[tuple[str, str, float, float]]:
    """Return (card, name, planned ms, measured ms) of the configurations in the benchmarks of a card."""
    row = re.compile(r"^\| (\S+ (?:full|lora) \d+x\d+x\d+[^|]*?) \|(?: [^|]+ \|){3} (\d+) \| (\d+) \|", re.M)
    text = (BENCHMARKS / f"{card}.md").read_text(encoding="utf-8")
    return [(card, name, float(planned), float(measured)) for name, planned, measured in row.findall(text)]


PROMISED = [*_promised("h200")[::8], *_promised("h100")[::4]]
"""Every eighth row of the one, every fourth of the other. Planning all of them takes a minute and a half."""


@pytest.mark.parametrize(
    ("card", "name", "planned_ms", "measured_ms"), PROMISED, ids=[f"{c}: {n}" for c, n, _, _ in PROMISED]
)
def test_the_plan_of_a_published_configuration_is_quoted_and_near_the_measured_time(
    card: str, name: str, planned_ms: float, measured_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import promise
    import step

    assert promise.Configuration.named(name).name == name
    monkeypatch.setattr(step, "training_device", lambda: device(card))
    report = promise.planned(promise.Configuration.named(name))
    assert report is not None and report.step.seconds * 1000 == pytest.approx(planned_ms, abs=0.6)
    assert planned_ms == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "blocks", "tile", "measured_ms"), [(131_072, 36, 16_384, 42_821), (524_288, 9, 32_768, 145_053)]
)
def test_a_step_of_long_rows_takes_the_measured_time_within_a_fiftieth(
    tokens: int, blocks: int, tile: int, measured_ms: float, tmp_path: Path
) -> None:
    """Attention backward is nearly all of it: its rate is that of long rows (benchmarks/h200.md, 2026-11-30)."""
    config = json.loads((BENCHMARKS.parent / "examples/qwen3-8b/config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": 1 << 20, "num_hidden_layers": blocks}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    raw = {"model": str(tmp_path), "lora": True, "sequence_len": tokens, "row_tiles": tile, "recompute": True}
    raw |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "model_dtype": "bf16"}
    raw |= {"offload_residual": True, "offload_attention": True}
    registry = load_registry()
    plan = plan_run(open_run(load_config(raw, registry=registry, source="long"), registry), device("h200"), 1)
    assert plan.report.step.seconds * 1000 == pytest.approx(measured_ms, rel=0.02)


def test_every_published_row_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from rows import ROWS

    random_routes = ["lora-qwen3-30b-a3b"]  # routers of random weights choose few experts, so plans are too slow
    on_one_gpu = [row.name for row in ROWS if row.gpus == 1]  # plans of several are compared in docs/scaling.md
    assert on_one_gpu == [*(name for _, name, _ in STEP_MS), *random_routes]


_TINY = json.loads((BENCHMARKS.parent / "examples/tiny-qwen3/config.json").read_text())
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_NARROW = {**_HEADS, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256}
_DEEP = {**_HEADS, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 1024}


@pytest.mark.parametrize(
    ("measured_ms", "model", "settings"),
    [
        (310, {}, {}),
        (1163, {}, {"sequence_len": 1024, "per_device_train_batch_size": 2}),
        (47, {}, {"sequence_len": 32, "per_device_train_batch_size": 1}),
        (184, _NARROW, {}),
        (494, {}, {"optimizer": "adamw_8bit"}),
        (570, {}, {"recipe": "fp8-hybrid", "model_dtype": "bf16"}),
        (5677, {**_DEEP, "num_hidden_layers": 6}, {"sequence_len": 2048, "per_device_train_batch_size": 1}),
    ],
    ids=str,
)
def test_the_planned_time_of_a_step_on_one_core_is_within_a_half_of_the_measured(
    measured_ms: float,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured in processor time: least of six steps, AMD EPYC with AVX-512, torch 2.13, one thread (2026-11-26)."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    (tmp_path / "config.json").write_text(json.dumps({**_TINY, "max_position_embeddings": 4096, **model}))
    run = {"model": str(tmp_path), "from_scratch": True, "model_dtype": "fp32", "gradient_accumulation_steps": 1}
    shape = {"sequence_len": 256, "per_device_train_batch_size": 4, "sample_packing": False}
    registry = load_registry()
    loaded = load_config({**run, **shape, **settings}, registry=registry, source="a step on a CPU")
    planned_ms = plan_run(open_run(loaded, registry), device("cpu"), 1).report.step.seconds * 1000
    assert 1 / 1.5 < planned_ms / measured_ms < 1.5
