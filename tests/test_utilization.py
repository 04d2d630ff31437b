"""Model FLOPs utilization: FLOPs of the plan, and the peaks of the device table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surogate import run
from surogate.reporting.utilization import utilization
from surogate_core.machine.devices import DEVICES, cpu, device, gpu

ROOT = Path(__file__).parents[1]


def planned(name: str, **keys: Any) -> Any:
    settings = {"model": str(ROOT / "examples/qwen3-8b"), "datasets": [{"path": "x.txt", "type": "text"}], **keys}
    loaded = run.load(settings)
    return run.plan(loaded, device(name))


def of(plan: Any) -> Any:
    found = utilization(plan, plan.report.device.title)
    assert found is not None
    return found


def test_the_peaks_are_those_of_data_sheets() -> None:
    peaks = {"h100": 989e12, "h200": 989e12, "a100": 312e12}
    assert {name: DEVICES[name].peak_flops for name in peaks} == peaks
    assert gpu("NVIDIA H200", 90, 1 << 37).peak_flops == 989e12
    assert gpu("NVIDIA Nothing 1000", 90, 1 << 37).peak_flops == 0 == cpu().peak_flops


def test_flops_per_token_are_six_for_each_weight_of_a_product_and_attention() -> None:
    """Of Qwen3-8B: all matrices but the embedding, and 12 n_layers n_heads head_dim T / 2 for causal attention."""
    used = of(planned("h200", sequence_len=2048, lora=False))
    products = 36 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 12288) + 151936 * 4096
    attention = 12 * 36 * 32 * 128 * 2048 / 2
    assert used.flops_per_token == pytest.approx(6 * products + attention, rel=0.02)
    assert used.of(1e4) == pytest.approx(1e4 * used.flops_per_token / 989e12)
    assert "GFLOPs per token" in str(used) and "989 TFLOP/s (dense bf16 peak of NVIDIA H200)" in str(used)


def test_recomputation_and_more_ranks_change_no_flops_per_token_and_an_adapter_saves_a_third() -> None:
    plain = of(planned("h200", sequence_len=1024, lora=False, recompute=False)).flops_per_token
    assert of(planned("h200", sequence_len=1024, lora=False, recompute=True)).flops_per_token == plain
    assert of(planned("h200", sequence_len=1024, lora=True)).flops_per_token == pytest.approx(plain * 2 / 3, rel=0.03)


def test_a_device_without_a_known_peak_has_none() -> None:
    assert utilization(planned("cpu", sequence_len=64), "a CPU") is None
