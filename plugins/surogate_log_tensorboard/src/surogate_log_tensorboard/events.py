"""Writes reports as TensorBoard event files. Imports torch's writer, which imports the package `tensorboard`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from surogate_core.api import (
    ConfigError,
    EndReport,
    Logger,
    Report,
    RunInfo,
    SampleReport,
    figures_of,
)

FOLDER = "tensorboard"
FLUSH_SECONDS = 10


class EventLogger(Logger):
    """Logger that writes event files. The writer has its own thread, so that a step does not wait for the disk.

    Each file begins with a start event for the next step (`purge_step`). Readers then drop the events of that step and
    of later ones from earlier files in the folder, because this run writes them again.
    """

    def __init__(self, info: RunInfo, directory: str | None) -> None:
        folder = _folder(info.output_dir, directory)
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
        self._writer.add_text(tag, _block(json.dumps(content, indent=2, default=str)), step)

    def report(self, report: Report) -> None:
        if isinstance(report, SampleReport):
            shown = "\n\n".join(_block(text) for text in (report.prompt, report.text))
            self._writer.add_text(f"sample/{report.index}", shown, report.step, walltime=report.time)
        if isinstance(report, EndReport):
            self._writer.add_text("end", _block(report.message), report.step, walltime=report.time)
        for tag, value in figures_of(report).items():
            self._writer.add_scalar(tag, value, report.step, walltime=report.time)

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


def check(output_dir: Path, directory: str | None) -> None:
    """Raise ConfigError if the folder of the events cannot be made or written."""
    folder = _folder(output_dir, directory)
    place = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), Path())
    problem = "" if place.is_dir() else "is no folder"
    if not problem and not os.access(place, os.W_OK | os.X_OK):
        problem = "Permission denied"
    if problem:
        raise ConfigError(f"tensorboard_dir: cannot write to {place}: {problem}. Use another folder.")


def _folder(output_dir: Path, directory: str | None) -> Path:
    return Path(directory) if directory else output_dir / FOLDER


def _block(text: str) -> str:
    """Return a Markdown code block, which is indented by four spaces."""
    return "    " + text.replace("\n", "\n    ")
