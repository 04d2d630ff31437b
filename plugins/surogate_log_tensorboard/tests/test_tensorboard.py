"""Event files, read back with TensorBoard's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tracker_reports import end_report, gpu_report, output_report, run_info, sample_report, step_report

from surogate_core.api import ConfigError, EvalReport

reader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="TensorBoard is not installed: pip install surogate-log-tensorboard",
)
plugin = pytest.importorskip(
    "surogate_log_tensorboard.plugin", reason="the plugin is not installed: pip install surogate-log-tensorboard"
)

(DEFINITION,) = plugin.surogate_loggers()


def read(folder: Path) -> Any:
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return events


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 4)) for event in read(folder).Scalars(tag)]


def test_tensorboard_reads_what_is_reported(tmp_path: Path) -> None:
    logger = DEFINITION.open(run_info(tmp_path), plugin.TensorBoardOptions())
    for number in (1, 2):
        logger.report(step_report(number, 3.0 - number))
    logger.report(EvalReport(step=2, loss=1.5, valid_tokens=60, duration_ms=3.0, time=1e9))
    logger.report(gpu_report(2, gpu=1))
    logger.report(output_report(2, best_step=1, best_value=1.25))
    logger.report(sample_report(2, "It is I.\n<b>"))
    logger.report(end_report(2, "rank 1 was lost"))
    logger.close("done")
    folder = tmp_path / "tensorboard"
    assert curve(folder, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert curve(folder, "train/lr") == [(1, 3e-4), (2, 3e-4)]
    assert curve(folder, "eval/loss") == [(2, 1.5)]
    assert curve(folder, "outputs/best_loss") == [(2, 1.25)] and curve(folder, "outputs/weights_step") == [(2, 1.0)]
    assert curve(folder, "gpu/1/memory_used_gib") == [(2, 3.0)]
    events = read(folder)
    assert "gpu/1/memory_clock_mhz" not in events.Tags()["scalars"]  # the driver does not report it
    (config,) = events.Tensors("config/text_summary")
    assert b'"learning_rate": 0.0003' in config.tensor_proto.string_val[0]
    (end,) = events.Tensors("end/text_summary")
    assert end.step == 2 and end.tensor_proto.string_val[0] == b"    rank 1 was lost"
    (sample,) = events.Tensors("sample/1/text_summary")
    assert sample.step == 2 and sample.tensor_proto.string_val[0] == b"    Who?\n    You.\n\n    It is I.\n    <b>"
    assert events.Scalars("train/loss")[0].wall_time == 1e9 + 1


def test_a_resumed_run_replaces_events_after_its_checkpoint(tmp_path: Path) -> None:
    for done, first, loss in ((0, 1, 9.0), (3, 4, 5.0)):
        logger = DEFINITION.open(run_info(tmp_path, done), plugin.TensorBoardOptions())
        for number in range(first, 7 if done == 0 else 6):
            logger.report(step_report(number, loss))
        logger.close("interrupted")
    assert curve(tmp_path / "tensorboard", "train/loss") == [(1, 9.0), (2, 9.0), (3, 9.0), (4, 5.0), (5, 5.0)]


def test_a_fresh_run_in_an_old_folder_replaces_the_old_run(tmp_path: Path) -> None:
    options = plugin.TensorBoardOptions(tensorboard_dir=str(tmp_path / "board"))
    for loss, last in ((9.0, 5), (4.0, 2)):
        logger = DEFINITION.open(run_info(tmp_path), options)
        for number in range(1, last + 1):
            logger.report(step_report(number, loss))
        logger.close("done")
    assert curve(tmp_path / "board", "train/loss") == [(1, 4.0), (2, 4.0)]


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tensorboard_dir: cannot write to .*file"):
        DEFINITION.open(run_info(tmp_path), plugin.TensorBoardOptions(tensorboard_dir=str(tmp_path / "file")))
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match=r"tensorboard_dir: cannot write to .*file: is no folder"):
            DEFINITION.check(tmp_path, plugin.TensorBoardOptions(tensorboard_dir=str(folder)))
    DEFINITION.check(tmp_path / "new/folder", plugin.TensorBoardOptions())
    assert not (tmp_path / "new").exists()
