"""Runs on a real Ray cluster of two nodes on this machine, on CPU ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.product import Workplace, documents, losses, make_workplace, records, write_jsonl

from surogate import run
from surogate_core.api import ConfigError

pytest.importorskip("ray", reason="Ray is not installed: pip install surogate-launch-ray")
pytest.importorskip("surogate_launch_ray", reason="the plugin is not installed: pip install surogate-launch-ray")

from ray_clusters import Driver, actors, cluster, wait_until

TWO = {"num_nodes": 2}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster() as made:
        yield made.address


@pytest.fixture
def place(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return make_workplace(tmp_path, max_steps=4, eval_steps=4, save_steps=0, distributed=TWO)


def test_two_nodes_train_as_one_process_does_and_write_once(place: Workplace, tmp_path: Path) -> None:
    said: list[str] = []
    nodes = run.train(
        run.load(place.write(distributed={**TWO, "worker_output_dir": str(tmp_path / "workers")})), said.append
    )
    one = {"distributed": None, "output_dir": str(tmp_path / "one"), "gradient_accumulation_steps": 4}
    run.train(run.load(place.write(**one)), lambda line: None)
    assert losses(place.out) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert [r["step"] for r in records(place.out, "step")] == [1, 2, 3, 4]
    assert nodes.steps == 4 and nodes.output_dir == place.out and (place.out / "model.safetensors").exists()
    assert [line.split()[0] for line in said[:3]] == ["Ray:", "Ray:", "qwen3,"]
    assert (
        said[0].endswith("; no GPUs on each")
        and said[1] == "Ray: 2 ranks in 2 processes on 2 machines, connected by gloo"
    )
    assert not (place.out / "logs").exists()
    (log,) = (tmp_path / "workers").rglob("*.log")
    assert log.name == "rank_00001.log" and "on 2 machines" in log.read_text()


def test_nodes_that_are_not_free_end_the_run_with_what_is_free(place: Workplace) -> None:
    said: list[str] = []
    config = place.write(distributed={"num_nodes": 3, "gpus_per_node": 1, "placement_seconds": 1})
    with pytest.raises(ConfigError) as caught:
        run.train(run.load(config), said.append)
    assert said == ["waiting up to 1 s for 3 nodes with 1 CPU and 1 GPU each in the Ray cluster"]
    text = str(caught.value)
    assert text.startswith("launcher: ray: 3 nodes with 1 CPU and 1 GPU each were not free within 1 s. Free are: ")
    assert len(re.findall(r"\d of 2 CPUs, 0 of 0 GPUs on ", text)) == 2


@pytest.mark.slow
def test_an_error_of_a_node_is_raised_as_it_was(place: Workplace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"surogate.*|model") as caught:
        run.train(run.load(place.write(model=str(tmp_path / "nowhere"))), lambda line: None)
    assert str(tmp_path / "nowhere") in str(caught.value)


@pytest.mark.slow
def test_ctrl_c_at_the_driver_saves_and_a_resumed_run_continues(place: Workplace, address: str) -> None:
    sets = ("max_steps=20000", "eval_steps=0")
    driver = Driver(place, address, *sets)
    driver.wait_for("step 5/20000")
    driver.process.send_signal(signal.SIGUSR1)
    driver.wait_for("saved step_")
    driver.process.send_signal(signal.SIGINT)
    assert driver.end() == 130, driver.output
    assert "interrupted after step" in driver.output and driver.output.count("saved step_") == 2
    wait_until(lambda: not actors(address))
    done = records(place.out, "step")[-1]["step"]
    again = Driver(place, address, *sets, "resume_from_checkpoint=true")
    again.wait_for(f"step {done + 1}/20000")
    again.process.send_signal(signal.SIGINT)
    assert again.end() == 130, again.output
    assert [r["step"] for r in records(place.out, "step")][: done + 1] == [*range(1, done + 2)]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once(place: Workplace, address: str) -> None:
    driver = Driver(place, address, "max_steps=20000")
    driver.wait_for("step 2/20000")
    os.kill(max(actors(address)), signal.SIGSTOP)  # so that no step ends any more
    driver.process.send_signal(signal.SIGTERM)
    driver.wait_for("a second signal ends all")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.end() == 143
    wait_until(lambda: not actors(address))


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_run_with_its_status(place: Workplace, address: str) -> None:
    driver = Driver(place, address, "max_steps=20000")
    wait_until(lambda: len(actors(address)) == 2)
    driver.wait_for("no GPUs on each")
    driver.process.send_signal(signal.SIGINT)
    assert driver.end() == 130, driver.output
    assert "Traceback" not in driver.output
    wait_until(lambda: not actors(address))


@pytest.mark.slow
def test_the_processes_end_with_a_driver_that_is_killed(place: Workplace, address: str) -> None:
    driver = Driver(place, address, "max_steps=20000")
    driver.wait_for("step 2/20000")
    assert len(actors(address)) == 2
    driver.process.kill()
    wait_until(lambda: not actors(address))


@pytest.mark.slow
def test_a_second_job_trains_at_the_same_time(place: Workplace, address: str, tmp_path: Path) -> None:
    first = Driver(place, address, "max_steps=20000", "eval_steps=0")
    first.wait_for("step 2/20000")
    second = Driver(place, address, f"output_dir={tmp_path / 'second'}")
    assert second.end() == 0, second.output
    assert first.process.poll() is None
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130
    assert len(losses(tmp_path / "second")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_is_killed_ends_the_run_with_one_message(place: Workplace, address: str, process: int) -> None:
    driver = Driver(place, address, "max_steps=20000", "eval_steps=0")
    driver.wait_for("step 5/20000")
    os.kill(sorted(actors(address))[process], signal.SIGKILL)
    assert driver.end() == 3, driver.output
    assert driver.output.count("error: ") == 1
    assert " is gone" in driver.output or "the process of rank 0 at" in driver.output, driver.output
    wait_until(lambda: not actors(address))


@pytest.mark.slow
def test_nodes_end_at_the_same_step_and_write_the_best_weights(place: Workplace, tmp_path: Path) -> None:
    few, held = (
        write_jsonl(tmp_path / "few.jsonl", documents(16)),
        write_jsonl(tmp_path / "held.jsonl", documents(20, skip=300)),
    )
    data = {
        "datasets": [{"path": str(few), "type": "text"}],
        "validation_datasets": [{"path": str(held), "type": "text"}],
    }
    overfits = {"learning_rate": 0.01, "lr_scheduler_type": "constant", "max_steps": 30, "eval_steps": 2}
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    said: list[str] = []
    result = run.train(run.load(place.write(**data, **overfits, **rows, early_stopping_patience=3)), said.append)
    assert (result.steps, result.weights_step) == (10, 4) and any("early stopping" in line for line in said)
    assert (place.out / "model.safetensors").read_bytes() == (
        place.out / "step_00000004/model.safetensors"
    ).read_bytes()
