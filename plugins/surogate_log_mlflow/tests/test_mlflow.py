"""Runs of MLflow in its store of files, read back by its own client, and servers that do not answer."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tracker_reports import end_report, gpu_report, run_info, step_report

from surogate_core.api import ConfigError, EvalReport, SampleReport

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install surogate-log-mlflow")
plugin = pytest.importorskip(
    "surogate_log_mlflow.plugin", reason="the plugin is not installed: pip install surogate-log-mlflow"
)

(DEFINITION,) = plugin.surogate_loggers()


@pytest.fixture(autouse=True)
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return (tmp_path / "store").as_uri()


def options(address: str, **keys: Any) -> Any:
    return plugin.MlflowOptions(mlflow_tracking_uri=address, **keys)


def test_the_error_that_ended_a_run_is_a_tag_of_it(tmp_path: Path, address: str) -> None:
    DEFINITION.check(tmp_path, options(address))
    assert not (tmp_path / "mlflow").exists()
    logger = DEFINITION.open(run_info(tmp_path), options(address))
    logger.report(end_report(3, "rank 1 was lost"))
    logger.close("failed")
    client = mlflow.tracking.MlflowClient(tracking_uri=address)
    run = client.get_run((tmp_path / "mlflow/run_id").read_text().strip())
    assert run.data.tags["surogate.end"] == "step 3: rank 1 was lost" and run.info.status == "FAILED"


def report(output_dir: Path, address: str, done_steps: int, last: int, status: str = "done") -> Any:
    """Log steps and an evaluation. Return MLflow's run."""
    logger = DEFINITION.open(run_info(output_dir, done_steps), options(address))
    for number in range(done_steps + 1, last + 1):
        logger.report(step_report(number, loss=10 - number, metrics={"rewards/margins": 0.5}, mfu=0.4))
    logger.report(EvalReport(step=last, loss=1.5, valid_tokens=60, duration_ms=3.0, time=1e9))
    logger.report(gpu_report(last - 1))
    how = {"tokens": 2, "finish": "stop", "duration_ms": 1.0, "time": 1e9}
    logger.report(SampleReport(step=last, index=0, prompt="Who?", text=f"It is {last}.", **how))
    logger.close(status)
    client = mlflow.tracking.MlflowClient(tracking_uri=address)
    return client.get_run((output_dir / "mlflow/run_id").read_text().strip()), client


def test_a_run_has_the_reports_and_a_resumed_one_continues_it(tmp_path: Path, address: str) -> None:
    run, client = report(tmp_path, address, 0, 3, "interrupted")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {metric.step: metric.value for metric in history} == {1: 9, 2: 8, 3: 7}
    last = run.data.metrics
    assert (last["train/rewards/margins"], last["train/mfu"], last["train/lr"]) == (0.5, 0.4, 3e-4)
    assert (last["eval/loss"], last["gpu/0/utilization"]) == (1.5, 0.75)
    assert run.data.params["learning_rate"] == "0.0003" and run.data.tags["surogate.device"] == "cpu"
    name = client.download_artifacts(run.info.run_id, "samples/0/step_00000003.txt", str(tmp_path))
    assert Path(name).read_text() == "Who?\n\nIt is 3.\n"
    assert run.info.status == "KILLED" and run.info.run_name == run_info(tmp_path, 0).run_name
    again, client = report(tmp_path, address, 2, 4)
    assert again.info.run_id == run.info.run_id and again.info.status == "FINISHED"
    assert {m.step for m in client.get_metric_history(run.info.run_id, "train/loss")} == {1, 2, 3, 4}
    fresh, _ = report(tmp_path, address, 0, 1)
    assert fresh.info.run_id != run.info.run_id


def test_a_server_that_does_not_answer_is_an_error_before_the_first_step_without_its_password(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=r"report_to: mlflow: http://127\.0\.0\.1.*Check the address") as caught:
        DEFINITION.open(run_info(tmp_path), options(f"http://127.0.0.1:{port}"))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ConfigError, match=r"report_to: mlflow: http://127\.0\.0\.1.*Check the address"):
        DEFINITION.check(tmp_path, options(f"http://127.0.0.1:{port}"))
    os.environ["MLFLOW_TRACKING_URI"] = f"http://me:hunter2@127.0.0.1:{port}"
    with pytest.raises(ConfigError) as caught:
        DEFINITION.open(run_info(tmp_path), plugin.MlflowOptions())
    assert "hunter2" not in str(caught.value)


def test_a_run_without_an_address_and_a_password_in_the_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no address of a server\. Set mlflow_tracking_uri"):
        DEFINITION.open(run_info(tmp_path), plugin.MlflowOptions())
    with pytest.raises(ConfigError, match="no address of a server"):
        DEFINITION.check(tmp_path, plugin.MlflowOptions())
    with pytest.raises(ConfigError, match="holds a password"):
        DEFINITION.check(tmp_path, options("https://me:hunter2@host"))
    with pytest.raises(ConfigError, match="holds a password") as caught:
        DEFINITION.open(run_info(tmp_path), options("https://me:hunter2@host"))
    assert "hunter2" not in str(caught.value)


def test_a_server_that_fails_later_is_reported_once_and_not_waited_for(tmp_path: Path, address: str) -> None:
    logger = DEFINITION.open(run_info(tmp_path), options(address))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("503 of http://me:hunter2@host/api")

    logger._client.log_batch = fail
    logger.report(step_report(1, loss=1.0))
    logger._thread.join(10)
    with pytest.raises(RuntimeError, match="503") as caught:
        logger.report(step_report(2, loss=1.0))
    assert "hunter2" not in str(caught.value)
