"""Reports of a run, for the tests of the tracker plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surogate_core.api import EndReport, GpuReport, OutputReport, RunInfo, SampleReport, StepReport


def run_info(output_dir: Path, done_steps: int = 0) -> RunInfo:
    """Return the description of a run of 10 steps that starts or resumes after `done_steps` steps."""
    return RunInfo(
        run_name="tiny",
        output_dir=output_dir,
        total_steps=10,
        steps_per_epoch=5,
        tokens_per_step=64,
        config={"learning_rate": 3e-4},
        versions={"torch": "2.13.0"},
        device="cpu",
        parameters=10,
        trainable_parameters=10,
        done_steps=done_steps,
    )


def step_report(number: int, loss: float, **further: Any) -> StepReport:
    """Return the report of step `number`."""
    return StepReport(
        step=number,
        epoch=number / 5,
        loss=loss,
        norm=0.5,
        lr=3e-4,
        tokens=64,
        valid_tokens=60,
        tokens_per_second=1e3,
        duration_ms=64.0,
        time=1e9 + number,
        **further,
    )


def output_report(number: int, best_step: int, best_value: float) -> OutputReport:
    """Return the report of outputs that have the weights of the least loss, of a run that ended after step `number`."""
    best = {"best_step": best_step, "best_value": best_value}
    return OutputReport(step=number, weights_step=best_step, metric="loss", stop_reason="why", time=1e9, **best)  # type: ignore[arg-type]


def end_report(number: int, message: str) -> EndReport:
    """Return the report of a run that an error ended after step `number`."""
    return EndReport(step=number, status="failed", message=message, time=1e9)


def sample_report(number: int, text: str) -> SampleReport:
    """Return the report of a sample after step `number`."""
    how = {"tokens": 5, "finish": "stop", "duration_ms": 9.0, "time": 1e9 + number}
    return SampleReport(step=number, index=1, prompt="Who?\nYou.", text=text, **how)


def gpu_report(number: int, gpu: int = 0) -> GpuReport:
    """Return the report of a GPU during step `number`. The driver does not report two of the figures."""
    return GpuReport(
        step=number,
        gpu=gpu,
        utilization=0.75,
        memory_utilization=None,
        memory_used_bytes=3 * 2**30,
        memory_total_bytes=4 * 2**30,
        power_watts=300.0,
        power_limit_watts=700.0,
        temperature_celsius=55,
        sm_clock_mhz=1980,
        memory_clock_mhz=None,
        time=1e9,
    )
