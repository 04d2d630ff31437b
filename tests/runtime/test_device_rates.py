"""`surogate doctor --measure`: rates from micro-benchmarks, and their use by later plans. Timed by a made-up clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surogate.cli.doctor import comparison, measure_command
from surogate.machine.cache_home import device_file
from surogate.machine.rates_file import as_measured, read_rates, write_rates
from surogate_core.errors import ConfigError
from surogate_core.machine import local_device
from surogate_core.machine.devices import gpu
from surogate_core.machine.measured_rates import MeasuredRates
from surogate_core.runtime.device_rates import Reading, Sizes, gpu_clock, measure_rates

TITLE = "NVIDIA H200"
SMALL = Sizes(tokens=32, widths=((32, 64), (64, 128)), copy_bytes=1 << 16, settle=0.0, seconds=0.0)
RATES = MeasuredRates(
    title=TITLE, date="2026-01-02", flops={"bf16": 6e14}, bandwidth=4e12, launch_seconds=3e-6, host_bandwidth=5e10
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def one_millisecond(work: Callable[[], object], settle: float, seconds: float) -> float:
    work()
    return 1e-3


def test_rates_are_work_over_time() -> None:
    readings: list[Reading] = []
    rates = measure_rates("CPU", torch.device("cpu"), one_millisecond, SMALL, readings.append)
    per_token = [6 * (3 * w * w // 2 + 2 * w * inner + inner * w) for w, inner in SMALL.widths]
    assert rates.flops["bf16"] == rates.flops["fp32"] == pytest.approx(32 * sum(per_token) / 2e-3)
    assert rates.bandwidth == 2 * SMALL.copy_bytes / 1e-3 and rates.host_bandwidth == SMALL.copy_bytes / 1e-3
    assert rates.launch_seconds == pytest.approx(2e-6)
    assert [r.rate for r in readings[1:5:2]] == [pytest.approx(32 * flops / 1e-3) for flops in per_token]
    assert {"device to host", "host to device", "both at once, each"} < {r.name for r in readings}


def test_a_later_plan_on_a_card_of_the_same_name_takes_the_rates() -> None:
    before = gpu(TITLE, 90, 1 << 37)
    assert before == as_measured(before) and read_rates(TITLE) is None
    path = write_rates(RATES)
    assert path == device_file("devices", TITLE) and read_rates(TITLE) == RATES
    after = as_measured(before)
    assert (after.flops["bf16"], after.flops["fp8"]) == (6e14, before.flops["fp8"]), "fp8 was not measured"
    assert (after.bandwidth, after.host_bandwidth, after.launch_seconds) == (4e12, 5e10, 3e-6)
    assert after.source == "measured here 2026-01-02" and after.memory_bytes == 1 << 37
    other = gpu("NVIDIA H100 80GB HBM3", 90, 1 << 36)
    assert as_measured(other) == other, "measured on another card"
    assert "0.90" in comparison(before, RATES) and "600.0 TFLOP/s" in comparison(before, RATES)


@pytest.mark.parametrize("damage", ["", "[]", '{"title": 1}', "bit", "rate of 0.2.0"])
def test_a_damaged_file_is_named_and_not_used(damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rates(RATES)
    whole = path.read_text()
    assert "4000000000000.0" in whole
    changed = {
        "bit": whole.replace("4000000000000.0", "5000000000000.0"),
        "rate of 0.2.0": json.dumps({**json.loads(whole)["rates"], "bandwidth": 0.0}),
    }
    path.write_text(changed.get(damage, damage))
    assert read_rates(TITLE) is None
    assert f"{path}: is damaged and not used" in capsys.readouterr().err


def test_rates_of_earlier_versions_are_read() -> None:
    path = write_rates(RATES)
    path.write_text(json.dumps(json.loads(path.read_text())["rates"]))
    assert read_rates(TITLE) == RATES


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_device, "visible_gpus", _none)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="no GPU is visible"):
        measure_command()


def _none() -> None:
    raise local_device.NoGpuError("no GPU found")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
def test_rates_of_this_gpu_are_those_of_a_gpu() -> None:
    """Between what any card since SM80 reaches and what none does. A short measurement, at the clock of a cold card."""
    sizes = Sizes(tokens=4096, widths=((2048, 6144),), copy_bytes=1 << 27, settle=0.1, seconds=0.2)
    rates = measure_rates("GPU", torch.device("cuda", 0), gpu_clock, sizes, lambda reading: None)
    assert 2e13 < rates.flops["bf16"] < 1e16 and rates.flops["fp32"] < rates.flops["bf16"]
    assert ("fp8" in rates.flops) == (torch.cuda.get_device_capability() >= (8, 9))
    assert 1e11 < rates.bandwidth < 2e13 and 1e9 < rates.host_bandwidth < 1e12
    assert 5e-7 < rates.launch_seconds < 2e-5
