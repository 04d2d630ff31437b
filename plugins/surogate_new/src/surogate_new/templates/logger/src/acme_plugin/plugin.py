"""A logger for Surogate: the loss of every step in a file of its own"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Logger, LoggerDef, Report, RunInfo, StepReport, provides

SUROGATE_API = {"loggers": 1}


class Options(BaseModel):
    """Keys of the YAML file. The prefix keeps them apart from those of other plugins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acme_toy_file: str = Field("losses.csv", description="File in `output_dir` for the losses.")


class LossFile(Logger):
    """Writes a line for each step. Other reports are of evaluations, GPUs and numerics."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self._file = path.open("a" if resumed else "w")
        if not resumed:
            self._file.write("step,loss\n")

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self._file.write(f"{report.step},{report.loss}\n")

    def close(self, status: str) -> None:
        self._file.close()


def open_file(info: RunInfo, options: Options) -> Logger:
    return LossFile(info.output_dir / options.acme_toy_file, resumed=info.done_steps > 0)


surogate_loggers = provides(
    [LoggerDef(name="acme_toy", summary="the loss of every step in a file", options=Options, open=open_file)]
)
