from __future__ import annotations

from pathlib import Path

from acme_plugin.plugin import Options, open_file

from surogate_core.api import RunInfo, StepReport


def info(folder: Path, done_steps: int) -> RunInfo:
    return RunInfo(
        run_name="run",
        output_dir=folder,
        total_steps=4,
        steps_per_epoch=4,
        tokens_per_step=64,
        config={},
        versions={},
        device="CPU",
        parameters=100,
        trainable_parameters=100,
        done_steps=done_steps,
    )


def report(step: int, loss: float) -> StepReport:
    figures = dict.fromkeys(("epoch", "norm", "lr", "tokens_per_second", "duration_ms", "time"), 1.0)
    return StepReport(step=step, loss=loss, tokens=64, valid_tokens=64, **figures)


def test_each_step_is_a_line_and_a_resumed_run_adds_to_them(tmp_path: Path) -> None:
    logger = open_file(info(tmp_path, 0), Options())
    logger.report(report(1, 5.5))
    logger.close("done")
    logger = open_file(info(tmp_path, 1), Options())
    logger.report(report(2, 5.25))
    logger.close("done")
    assert (tmp_path / "losses.csv").read_text() == "step,loss\n1,5.5\n2,5.25\n"
