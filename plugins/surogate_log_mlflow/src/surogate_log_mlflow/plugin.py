"""Hooks of `surogate-log-mlflow`."""

from __future__ import annotations

from surogate_core.api import Logger, LoggerDef, RunInfo, provides

from .options import MlflowOptions

SUROGATE_API = {"loggers": 1}


def _open(info: RunInfo, options: MlflowOptions) -> Logger:
    from .tracker import MlflowLogger

    return MlflowLogger(info, options)


surogate_loggers = provides(
    [LoggerDef(name="mlflow", summary="sends all reports to an MLflow server", options=MlflowOptions, open=_open)]
)
