"""Runs that are submitted to the job server of a Ray cluster, as `ray job submit` does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import COMMAND, Workplace, losses, make_workplace, records

pytest.importorskip("surogate_launch_ray", reason="the plugin is not installed: pip install surogate-launch-ray")
pytest.importorskip("ray", reason="Ray is not installed: pip install surogate-launch-ray")
pytest.importorskip("aiohttp_cors", reason="the job server of Ray is not installed: pip install 'ray[default]'")

from ray_clusters import PATIENCE_SECONDS, cluster, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of the job server of a cluster of two nodes."""
    with pytest.MonkeyPatch.context() as patch, cluster(jobs=True) as made:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield f"http://{made.webui_url}"


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path, eval_steps=0, save_steps=0, distributed={"num_nodes": 2})


class Job:
    """A run that `ray job submit` has started, and whose output it shows."""

    def __init__(self, server: str, place: Workplace, name: str, *, seconds: int = 150, **changes: Any) -> None:
        """`seconds`: that the job may take to end once it is stopped; 0: the default."""
        self._server, self._name = server, name
        config = place.write(**changes)
        variables = {"XDG_CACHE_HOME": str(place.root / "cache")}
        if seconds:
            variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(seconds)
        words = ("--submission-id", name, "--runtime-env-json", json.dumps({"env_vars": variables}), "--")
        self._log = place.root / f"{name}.log"
        with self._log.open("w") as out:
            self._submit = subprocess.Popen(
                self._ray("submit", *words, *COMMAND, "train", str(config)), stdout=out, stderr=subprocess.STDOUT
            )

    def _ray(self, command: str, *words: str) -> Sequence[str]:
        return [str(Path(sys.executable).with_name("ray")), "job", command, "--address", self._server, *words]

    @property
    def output(self) -> str:
        return " ".join(self._log.read_text().split())

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.output or self._submit.poll() is not None)
        assert words in self.output

    def stop(self) -> None:
        subprocess.run(self._ray("stop", self._name), check=True, capture_output=True, timeout=PATIENCE_SECONDS)

    def end(self) -> tuple[int, str, int | None]:
        """Return the exit status of `ray job submit`, the status of the job, and the exit status of its driver."""
        from ray.job_submission import JobSubmissionClient

        try:
            status = self._submit.wait(PATIENCE_SECONDS)
        finally:
            self._submit.kill()
        info = JobSubmissionClient(self._server).get_job_info(self._name)
        return status, str(info.status), info.driver_exit_code


def test_a_job_trains_on_the_nodes_and_succeeds(server: str, place: Workplace) -> None:
    job = Job(server, place, "trains", max_steps=4)
    assert job.end() == (0, "SUCCEEDED", 0), job.output
    assert "2 ranks in 2 processes on 2 machines" in job.output and len(losses(place.out)) == 4
    assert (place.out / "model.safetensors").exists()


def test_a_job_that_is_stopped_has_saved_after_its_step(server: str, place: Workplace) -> None:
    job = Job(server, place, "stopped", max_steps=20000)
    job.wait_for("step 5/20000")
    job.stop()
    assert job.end() == (0, "STOPPED", None), job.output
    (saved,) = place.out.glob("step_????????")
    assert int(saved.name[-8:]) == records(place.out, "step")[-1]["step"]
    assert json.loads((saved / "manifest.json").read_text())
    assert "interrupted after step" in job.output and "Traceback" not in job.output


def test_a_job_that_is_refused_has_the_exit_status_of_the_command(server: str, place: Workplace) -> None:
    job = Job(server, place, "refused", seconds=0, model=str(place.root / "nowhere"))
    assert job.end() == (1, "FAILED", 2), job.output
    assert str(place.root / "nowhere") in job.output and "Traceback" not in job.output
    assert "Ray kills this job 3 s after `ray job stop`" in job.output
