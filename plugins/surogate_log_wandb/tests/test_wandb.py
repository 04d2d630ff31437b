"""Offline runs of Weights & Biases, read back from the files that `wandb sync` uploads."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tracker_reports import end_report, gpu_report, run_info, sample_report, step_report

from surogate_core.api import ConfigError, EvalReport

wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install surogate-log-wandb")
plugin = pytest.importorskip(
    "surogate_log_wandb.plugin", reason="the plugin is not installed: pip install surogate-log-wandb"
)

(DEFINITION,) = plugin.surogate_loggers()


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()  # wandb reads the environment once per process
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def written(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, begun = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a record header does not fit in the rest of the block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = Record()
            record.ParseFromString(begun)
            begun = b""
            yield record


def history(output_dir: Path) -> tuple[str, dict[int, dict[str, Any]], dict[str, Any]]:
    """Return the id, the rows by step and the config of the newest offline run."""
    run_id, rows, config = "", {}, {}
    newest = max((output_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for record in written(newest):
        run_id = record.run.run_id or run_id
        if record.HasField("run"):
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            rows[record.history.step.num] = {key: value for key, value in row.items() if key[0] != "_"}
    return run_id, rows, config


def report(output_dir: Path, done_steps: int, last: int) -> None:
    logger = DEFINITION.open(run_info(output_dir, done_steps), plugin.WandbOptions(wandb_project="p"))
    for number in range(done_steps + 1, last + 1):
        logger.report(step_report(number, loss=10 - number))
    logger.report(EvalReport(step=last, loss=1.5, valid_tokens=60, duration_ms=3.0, time=1e9))
    logger.report(sample_report(last, "It is I."))
    logger.report(gpu_report(last - 1))  # a GPU sample may arrive late
    logger.close("done")
    wandb.teardown()  # waits until wandb's process has written everything, as at exit


def test_offline_rows_contain_the_reports_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    report(tmp_path, 0, 3)
    first, rows, config = history(tmp_path)
    assert {number: row["train/loss"] for number, row in rows.items()} == {1: 9, 2: 8, 3: 7}
    assert (rows[3]["eval/loss"], rows[3]["gpu/0/utilization"], rows[3]["train/norm"]) == (1.5, 0.75, 0.5)
    table = json.loads(
        (tmp_path / "wandb").glob("offline-run-*/files/media/table/sample/*.json").__next__().read_text()
    )
    assert table["columns"] == ["step", "prompt", "text"] and table["data"] == [[3, "Who?\nYou.", "It is I."]]
    assert config["learning_rate"] == 3e-4 and config["device"] == "cpu"

    time.sleep(1)  # W&B names its folders by time, in seconds
    report(tmp_path, 2, 4)
    again, rows, _ = history(tmp_path)
    assert again == first == (tmp_path / "wandb/run_id").read_text().strip()
    assert {number: row["train/loss"] for number, row in rows.items()} == {3: 7, 4: 6}

    report(tmp_path, 0, 1)  # a fresh run gets a new id
    assert history(tmp_path)[0] != first


def test_disabled_writes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    report(tmp_path, 0, 2)
    assert not list(tmp_path.glob("wandb/*run-*"))


def test_a_missing_login_is_an_error_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match=r"report_to: wandb: .*WANDB_MODE=offline"):
        DEFINITION.open(run_info(tmp_path), plugin.WandbOptions())
    with pytest.raises(ConfigError, match=r"report_to: wandb: .*WANDB_MODE=offline"):
        DEFINITION.check(tmp_path, plugin.WandbOptions())


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_runs_that_send_nothing_need_no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    DEFINITION.check(tmp_path / "output", plugin.WandbOptions())
    assert not (tmp_path / "output").exists()


def test_the_error_that_ended_a_run_is_in_its_summary(tmp_path: Path) -> None:
    logger = DEFINITION.open(run_info(tmp_path), plugin.WandbOptions())
    logger.report(step_report(1, loss=2.0))
    logger.report(end_report(1, "rank 1 was lost"))
    logger.close("failed")
    wandb.teardown()
    summaries = {
        item.key: json.loads(item.value_json)
        for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")
        for record in written(path)
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert summaries["end"] == "step 1: rank 1 was lost" and summaries["status"] == "failed"
