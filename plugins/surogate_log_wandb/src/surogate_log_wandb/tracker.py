"""Sends reports to Weights & Biases. Imports `wandb`."""

from __future__ import annotations

import os
from pathlib import Path

import wandb

from surogate_core.api import (
    ConfigError,
    EndReport,
    Logger,
    Report,
    RunInfo,
    SampleReport,
    figures_of,
)

PROJECT = "Surogate"
RUN_ID = "wandb/run_id"


class WandbLogger(Logger):
    """Logger with one W&B run for a run and its resumptions. W&B's process sends the data, so a step does not wait."""

    def __init__(self, info: RunInfo, project: str | None, name: str | None) -> None:
        id_file = info.output_dir / RUN_ID
        run_id = os.environ.get("WANDB_RUN_ID") or (_read_id(id_file) if info.done_steps else None)
        try:
            id_file.parent.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or PROJECT,
                name=name or os.environ.get("WANDB_NAME") or info.run_name,
                dir=str(info.output_dir),
                id=run_id,
                resume="allow" if run_id else None,
                config={
                    **info.config,
                    "versions": dict(info.versions),
                    "device": info.device,
                    "parameters": info.parameters,
                    "trainable_parameters": info.trainable_parameters,
                    "tokens_per_step": info.tokens_per_step,
                    "total_steps": info.total_steps,
                },
                allow_val_change=True,
                # Do not capture the console: W&B would also record the cursor movements of the live display.
                settings=wandb.Settings(console="off"),
            )
            id_file.unlink(missing_ok=True)  # a link of this name would be written through
            id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        except wandb.Error as error:
            raise _refused(error) from error
        except OSError as error:
            raise ConfigError(f"output_dir: cannot write to {error.filename or id_file}: {error.strerror}.") from error
        self._step = info.done_steps

    def report(self, report: Report) -> None:
        self._step = max(self._step, report.step)  # W&B drops data for steps before the latest
        if isinstance(report, EndReport):
            self._run.summary["end"] = f"step {report.step}: {report.message}"
        elif isinstance(report, SampleReport):
            row = [report.step, report.prompt, report.text]
            table = wandb.Table(columns=["step", "prompt", "text"], data=[row])
            self._run.log({f"sample/{report.index}": table}, step=self._step)
        elif figures := figures_of(report):
            self._run.log(figures, step=self._step)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code={"done": 0, "interrupted": 130}.get(status, 1))


def check() -> None:
    """Raise ConfigError unless W&B has a login, or needs none. In a terminal W&B asks for it."""
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        wandb.login(verify=False)
    except wandb.Error as error:
        raise _refused(error) from error


def _refused(error: wandb.Error) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).rstrip(".")
    return ConfigError(
        f"report_to: wandb: {reason}. Log in with `wandb login`, or set WANDB_MODE=offline (to upload later), or "
        "remove wandb from report_to."
    )


def _read_id(path: Path) -> str | None:
    """Return the id of the interrupted run, or None if it was not logged to W&B."""
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
