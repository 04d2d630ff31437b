"""Ray clusters on this machine, each node with a raylet of its own, and runs on them as a user starts them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from end_to_end.product import COMMAND, Workplace, environment

PATIENCE_SECONDS = 180.0
"""What has not happened by then never does. No claim depends on it: the machine may be loaded."""

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@contextmanager
def cluster(nodes: int = 2, *, jobs: bool = False) -> Iterator[Any]:
    """Yield a `ray.cluster_utils.Cluster`, whose first node is the head. `jobs`: it takes jobs at `webui_url`."""
    from ray.cluster_utils import Cluster

    free = {"dashboard_port": None, "dashboard_agent_listen_port": None}  # ports
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": jobs, **(free if jobs else {})})
    try:
        for _ in range(nodes - 1):
            made.add_node(**NODE)
        yield made
    finally:
        made.shutdown()


class Driver:
    """`surogate train` on a cluster, in a process of its own, whose output goes to a file."""

    def __init__(self, place: Workplace, address: str, *sets: str) -> None:
        self._log = place.root / f"driver-{time.monotonic_ns()}.log"
        given = [word for value in sets for word in ("--set", value)]
        with self._log.open("w") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "train", str(place.write()), *given],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=place.root,
                env=environment(place.root, RAY_ADDRESS=address),
            )

    @property
    def output(self) -> str:
        return " ".join(self._log.read_text().split(" ")).replace("\r", "")

    def wait_for(self, words: str) -> None:
        """Wait until `words` are printed. Runs of blanks count as one."""
        wait_until(lambda: words in " ".join(self.output.split()) or self.process.poll() is not None)
        assert words in " ".join(self.output.split()), self.output

    def end(self) -> int:
        """Return the exit status when the process has ended."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def actors(address: str) -> set[int]:
    """Return the processes that train on nodes of a cluster. Other tests may have clusters too."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_text().startswith("ray::Node"):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if f"--gcs-address={address}\0" in Path("/proc", parent, "cmdline").read_text():
                    found.add(int(folder.name))
        except OSError:  # it has ended
            continue
    return found
