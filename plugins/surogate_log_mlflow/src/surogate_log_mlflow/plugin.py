"""Hooks of `surogate-log-mlflow`."""

from __future__ import annotations

from pathlib import Path

from surogate_core.api import Logger, LoggerDef, RunInfo, provides

from .options import MlflowOptions

SUROGATE_API = {"loggers": 1}


def _open(info: RunInfo, options: MlflowOptions) -> Logger:
    from .tracker import MlflowLogger

    return MlflowLogger(info, options)


def _check(output_dir: Path, options: MlflowOptions) -> None:
    from .tracker import check

    check(options)


surogate_loggers = provides(
    [
        LoggerDef(
            name="mlflow",
            summary="sends all reports to an MLflow server",
            options=MlflowOptions,
            open=_open,
            check=_check,
        )
    ]
)
