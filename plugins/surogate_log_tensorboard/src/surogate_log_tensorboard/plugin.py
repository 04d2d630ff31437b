"""Hooks of `surogate-log-tensorboard`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Logger, LoggerDef, RunInfo, provides

SUROGATE_API = {"loggers": 1}


class TensorBoardOptions(BaseModel):
    """Config keys of the plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard_dir: str | None = Field(
        None, min_length=1, description="Folder of the event files; null: `tensorboard` in `output_dir`."
    )


def _open(info: RunInfo, options: TensorBoardOptions) -> Logger:
    from .events import EventLogger

    return EventLogger(info, options.tensorboard_dir)


def _check(output_dir: Path, options: TensorBoardOptions) -> None:
    from .events import check

    check(output_dir, options.tensorboard_dir)


surogate_loggers = provides(
    [
        LoggerDef(
            name="tensorboard",
            summary="writes all reports as TensorBoard event files in output_dir/tensorboard",
            options=TensorBoardOptions,
            open=_open,
            check=_check,
        )
    ]
)
