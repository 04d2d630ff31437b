"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surogate_core.api import EvalReport, GpuReport, RunInfo, StepReport
from surogate_core.errors import ConfigError

reader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="TensorBoard is not installed: pip install surogate-log-tensorboard",
)
plugin = pytest.importorskip(
    "surogate_log_tensorboard.plugin", reason="the plugin is not installed: pip install surogate-log-tensorboard"
)

(DEFINITION,) = plugin.surogate_loggers()


def info(output_dir: Path, done_steps: int = 0) -> RunInfo:
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


def step(number: int, loss: float) -> StepReport:
    rates: dict[str, Any] = {"tokens": 64, "valid_tokens": 60, "tokens_per_second": 1e3, "duration_ms": 64.0}
    return StepReport(step=number, epoch=number / 5, loss=loss, norm=0.5, lr=3e-4, time=1e9 + number, **rates)


def gpu(number: int) -> GpuReport:
    return GpuReport(
        step=number, gpu=1, utilization=0.75, memory_utilization=None, memory_used_bytes=3 * 2**30, time=1e9,
        memory_total_bytes=4 * 2**30, power_watts=300.0, power_limit_watts=700.0, temperature_celsius=55,
        sm_clock_mhz=1980, memory_clock_mhz=None,
    )  # fmt: skip


def read(folder: Path) -> Any:
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return events


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 4)) for event in read(folder).Scalars(tag)]


def test_what_is_reported_is_what_tensorboard_reads(tmp_path: Path) -> None:
    logger = DEFINITION.open(info(tmp_path), plugin.TensorBoardOptions())
    for number in (1, 2):
        logger.step(step(number, 3.0 - number))
    logger.eval(EvalReport(step=2, loss=1.5, valid_tokens=60, duration_ms=3.0, time=1e9))
    logger.gpu(gpu(2))
    logger.close("done")
    folder = tmp_path / "tensorboard"
    assert curve(folder, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert curve(folder, "train/lr") == [(1, 3e-4), (2, 3e-4)]
    assert curve(folder, "eval/loss") == [(2, 1.5)]
    assert curve(folder, "gpu/1/memory_used_gib") == [(2, 3.0)]
    events = read(folder)
    assert "gpu/1/memory_clock_mhz" not in events.Tags()["scalars"]  # the driver did not tell it
    (config,) = events.Tensors("config/text_summary")
    assert b'"learning_rate": 0.0003' in config.tensor_proto.string_val[0]
    assert events.Scalars("train/loss")[0].wall_time == 1e9 + 1


def test_a_resumed_run_replaces_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    for done, first, loss in ((0, 1, 9.0), (3, 4, 5.0)):
        logger = DEFINITION.open(info(tmp_path, done), plugin.TensorBoardOptions())
        for number in range(first, 7 if done == 0 else 6):
            logger.step(step(number, loss))
        logger.close("interrupted")
    assert curve(tmp_path / "tensorboard", "train/loss") == [(1, 9.0), (2, 9.0), (3, 9.0), (4, 5.0), (5, 5.0)]


def test_a_fresh_start_in_an_old_folder_shows_the_new_run_alone(tmp_path: Path) -> None:
    options = plugin.TensorBoardOptions(tensorboard_dir=str(tmp_path / "board"))
    for loss, last in ((9.0, 5), (4.0, 2)):
        logger = DEFINITION.open(info(tmp_path), options)
        for number in range(1, last + 1):
            logger.step(step(number, loss))
        logger.close("done")
    assert curve(tmp_path / "board", "train/loss") == [(1, 4.0), (2, 4.0)]


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tensorboard_dir: cannot write to .*file"):
        DEFINITION.open(info(tmp_path), plugin.TensorBoardOptions(tensorboard_dir=str(tmp_path / "file")))
