"""The planned time of a step is within 10 % of the time that was measured.

`step_times.json` holds the measured times of the rows of benchmarks/rows.py. When kernels become faster, measure the
rows again (`python benchmarks/compare.py`) and adjust the constants of the estimate to the new times, never to single
models: rates and launches in `machine/devices.py`, efficiency and passes of ops in `standard_ops/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate_core.config.load import load_config
from surogate_core.machine.devices import device
from surogate_core.planning.plan import plan_run
from surogate_core.planning.run import open_run
from surogate_core.plugins.discovery import load_registry

MEASURED = json.loads((Path(__file__).parent / "step_times.json").read_text())
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("name", "measured_ms"), MEASURED["step_ms"].items(), ids=str)
def test_a_published_row_fits_and_its_planned_time_is_within_a_tenth_of_the_measured(
    name: str, measured_ms: float, monkeypatch: pytest.MonkeyPatch
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
    plan = plan_run(open_run(loaded, registry), device(MEASURED["device"]), 1)
    assert plan.report.fits
    planned_ms = plan.report.step.seconds * 1000
    assert planned_ms == pytest.approx(measured_ms, rel=0.1)


def test_every_published_row_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from rows import ROWS

    assert [row.name for row in ROWS] == list(MEASURED["step_ms"])
