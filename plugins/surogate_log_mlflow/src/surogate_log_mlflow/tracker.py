"""Sends reports to MLflow. Imports `mlflow`."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 7 of MLflow take minutes before a run starts

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from surogate_core.api import (
    ConfigError,
    EndReport,
    Logger,
    Report,
    RunInfo,
    SampleReport,
    figures_of,
)

from .options import MlflowOptions

EXPERIMENT = "Surogate"
RUN_ID = "mlflow/run_id"
END = "surogate.end"
"""A tag: the last step and the error or the signal that ended the run."""

LONGEST_PARAM, LONGEST_TAG = 500, 5000
"""Characters of a parameter and of a tag that every server takes."""

MOST_METRICS, MOST_PARAMS = 1000, 100
"""Of one request."""

END_SECONDS = 60.0
"""For what is left to send when a run ends."""

_STATUS = {"done": "FINISHED", "interrupted": "KILLED"}


class MlflowLogger(Logger):
    """Logger with one MLflow run for a run and its resumptions. A thread sends the reports, so a step does not wait.

    Samples are artifacts of the run, `samples/0/step_00000200.txt`: the prompt, an empty line, the text. An error that
    ends the run is its tag `surogate.end`.

    Raises what the thread failed with at the report after it.
    """

    def __init__(self, info: RunInfo, options: MlflowOptions) -> None:
        address = _address(options)
        id_file = info.output_dir / RUN_ID
        try:
            self._client = MlflowClient(tracking_uri=address)
            self._run_id = self._begun(info, options, _read_id(id_file) if info.done_steps else None)
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.unlink(missing_ok=True)  # a link of this name would be written through
            id_file.write_text(f"{self._run_id}\n", encoding="utf-8")
        except OSError as error:
            if not isinstance(error, ConnectionError) and error.filename:
                raise ConfigError(f"output_dir: cannot write to {error.filename}: {error.strerror}.") from error
            raise _unreachable(address, error) from error
        except (MlflowException, ImportError) as error:
            raise _unreachable(address, error) from error
        self._queue: SimpleQueue[list[Metric] | SampleReport | EndReport | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        if self._failure is not None:
            raise self._failure
        if isinstance(report, SampleReport | EndReport):
            self._queue.put(report)
            return
        stamp = int(report.time * 1000)
        self._queue.put([Metric(name, value, stamp, report.step) for name, value in figures_of(report).items()])

    def close(self, status: str) -> None:
        self._queue.put(None)
        self._thread.join(END_SECONDS)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"the server has not taken all metrics in {END_SECONDS:.0f} s")
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))

    def _begun(self, info: RunInfo, options: MlflowOptions, run_id: str | None) -> str:
        """Return the id of the run: that of an interrupted one, which goes on, or that of a new one."""
        client = self._client
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            return run_id
        name = _experiment(options)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        made = client.create_run(experiment, run_name=options.mlflow_run_name or info.run_name)
        params = [Param(key, _text(value)[:LONGEST_PARAM]) for key, value in info.config.items()]
        tags = [RunTag(name, _text(value)) for name, value in _facts(info).items()]
        for at in range(0, len(params), MOST_PARAMS):
            client.log_batch(made.info.run_id, params=params[at : at + MOST_PARAMS])
        client.log_batch(made.info.run_id, tags=tags)
        return str(made.info.run_id)

    def _send(self) -> None:
        """Send what is queued, all of it together, until the end is."""
        ended = False
        while not ended:
            waiting = [self._queue.get()]
            while True:
                try:
                    waiting.append(self._queue.get_nowait())
                except Empty:
                    break
            ended = None in waiting
            metrics = [metric for some in waiting if isinstance(some, list) for metric in some]
            try:
                for at in range(0, len(metrics), MOST_METRICS):
                    self._client.log_batch(self._run_id, metrics=metrics[at : at + MOST_METRICS])
                for sample in (some for some in waiting if isinstance(some, SampleReport)):
                    name = f"samples/{sample.index}/step_{sample.step:08d}.txt"
                    self._client.log_text(self._run_id, f"{sample.prompt}\n\n{sample.text}\n", name)
                for end in (some for some in waiting if isinstance(some, EndReport)):
                    self._client.set_tag(self._run_id, END, f"step {end.step}: {end.message}"[:LONGEST_TAG])
            except Exception as error:  # the thread of the loop raises it
                self._failure = RuntimeError(_without_secrets(str(error)))
                return


def check(options: MlflowOptions) -> None:
    """Raise ConfigError without an address, with a password in the config, and if the server does not answer."""
    address = _address(options)
    try:
        MlflowClient(tracking_uri=address).get_experiment_by_name(_experiment(options))
    except (OSError, MlflowException, ImportError) as error:
        raise _unreachable(address, error) from error


def _address(options: MlflowOptions) -> str:
    address = options.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        raise ConfigError(
            "report_to: mlflow: no address of a server. Set mlflow_tracking_uri, or the variable MLFLOW_TRACKING_URI."
        )
    if options.mlflow_tracking_uri and re.search(r"://[^/@]*:[^/@]*@", options.mlflow_tracking_uri):
        raise ConfigError(
            "mlflow_tracking_uri: holds a password, and outputs contain the config. Set MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD instead."
        )
    return address


def _experiment(options: MlflowOptions) -> str:
    return options.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT


def _facts(info: RunInfo) -> Mapping[str, Any]:
    sizes = ("device", "parameters", "trainable_parameters", "tokens_per_step", "total_steps")
    return {f"surogate.{name}": getattr(info, name) for name in sizes} | {
        f"surogate.version.{name}": version for name, version in info.versions.items()
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _unreachable(address: str, error: Exception) -> ConfigError:
    reason = _without_secrets(str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"report_to: mlflow: {_without_secrets(address)}: {reason}. Check the address, whether the server runs, and "
        "MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN, or remove mlflow from report_to."
    )


def _without_secrets(text: str) -> str:
    """Return a text without the names and passwords in its addresses."""
    return re.sub(r"://[^/@\s]*@", "://", text)


def _read_id(path: Path) -> str | None:
    """Return the id of the interrupted run, or None if it was not logged to MLflow."""
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
