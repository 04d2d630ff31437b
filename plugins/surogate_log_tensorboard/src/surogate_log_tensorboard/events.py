"""Writes reports as TensorBoard event files. Imports torch's writer, which imports the package `tensorboard`."""

from __future__ import annotations

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from surogate_core.api import ConfigError, EvalReport, GpuReport, NumericsReport, RunInfo, StepReport

FOLDER = "tensorboard"
FLUSH_SECONDS = 10


class EventLogger:
    """Logger that writes event files. The writer has its own thread, so that a step does not wait for the disk.

    Each file begins with a start event for the next step (`purge_step`). Readers then drop the events of that step and
    of later ones from earlier files in the folder, because this run writes them again.
    """

    def __init__(self, info: RunInfo, directory: str | None) -> None:
        folder = Path(directory) if directory else info.output_dir / FOLDER
        try:
            self._writer = SummaryWriter(str(folder), purge_step=info.done_steps + 1, flush_secs=FLUSH_SECONDS)
        except OSError as error:
            raise ConfigError(
                f"tensorboard_dir: cannot write to {error.filename or folder}: {error.strerror}. Use another folder."
            ) from error
        facts = {
            "run_name": info.run_name,
            "device": info.device,
            "parameters": info.parameters,
            "trainable_parameters": info.trainable_parameters,
            "tokens_per_step": info.tokens_per_step,
            "total_steps": info.total_steps,
            "versions": dict(info.versions),
        }
        self._text("config", info.config, info.done_steps)
        self._text("run", facts, info.done_steps)

    def _text(self, tag: str, content: object, step: int) -> None:
        indented = json.dumps(content, indent=2, default=str).replace("\n", "\n    ")
        self._writer.add_text(tag, f"    {indented}", step)  # indented by four spaces: a Markdown code block

    def step(self, report: StepReport) -> None:
        figures = {
            "loss": report.loss,
            "norm": report.norm,
            "lr": report.lr,
            "tokens_per_second": report.tokens_per_second,
            "epoch": report.epoch,
        }
        for name, value in figures.items():
            self._writer.add_scalar(f"train/{name}", value, report.step, walltime=report.time)

    def eval(self, report: EvalReport) -> None:
        self._writer.add_scalar("eval/loss", report.loss, report.step, walltime=report.time)

    def gpu(self, report: GpuReport) -> None:
        for name, value in report.figures().items():
            self._writer.add_scalar(f"gpu/{report.gpu}/{name}", value, report.step, walltime=report.time)

    def numerics(self, report: NumericsReport) -> None:
        for tensor, figures in report.largest().items():
            for column, (value, _) in zip(report.columns, figures, strict=True):
                tag = f"numerics/{tensor.replace('*.', '')}/{column.name}"
                self._writer.add_scalar(tag, value, report.step, walltime=report.time)

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()
