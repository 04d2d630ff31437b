"""Config keys of `surogate-log-mlflow`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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
