"""Hooks of `surogate-log-wandb`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Logger, LoggerDef, RunInfo, provides

SUROGATE_API = {"loggers": 1}


class WandbOptions(BaseModel):
    """Config keys of the plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wandb_project: str | None = Field(
        None, min_length=1, description="Project; null: the variable `WANDB_PROJECT`, else Surogate."
    )
    wandb_name: str | None = Field(None, min_length=1, description="Name of the run; null: `run_name`.")


def _open(info: RunInfo, options: WandbOptions) -> Logger:
    from .tracker import WandbLogger

    return WandbLogger(info, options.wandb_project, options.wandb_name)


def _check(output_dir: Path, options: WandbOptions) -> None:
    from .tracker import check

    check()


surogate_loggers = provides(
    [
        LoggerDef(
            name="wandb",
            summary="sends all reports to Weights & Biases; WANDB_MODE=offline keeps them in output_dir/wandb",
            options=WandbOptions,
            open=_open,
            check=_check,
        )
    ]
)
