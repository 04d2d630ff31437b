"""Hooks of `surogate-log-mlflow`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Logger, LoggerDef, RunInfo, provides

SUROGATE_API = {"loggers": 1}


class MlflowOptions(BaseModel):
    """Config keys of the plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mlflow_tracking_uri: str | None = Field(
        None,
        min_length=1,
        description="Address of the server, without a password; null: the variable `MLFLOW_TRACKING_URI`.",
    )
    mlflow_experiment: str | None = Field(
        None, min_length=1, description="Experiment; null: the variable `MLFLOW_EXPERIMENT_NAME`, else Surogate."
    )
    mlflow_run_name: str | None = Field(None, min_length=1, description="Name of the run; null: `run_name`.")


def _open(info: RunInfo, options: MlflowOptions) -> Logger:
    from .tracker import MlflowLogger

    return MlflowLogger(info, options)


surogate_loggers = provides(
    [LoggerDef(name="mlflow", summary="sends all reports to an MLflow server", options=MlflowOptions, open=_open)]
)
