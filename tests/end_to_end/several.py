"""Runs of several `surogate train` processes, and what a test does to one of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

from end_to_end.product import Workplace, environment

SECONDS = 180.0
"""Longest wait for anything: a bound that a slow machine keeps."""

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed", "end_to_end.several", "surogate.cli.train", "surogate.training.trainer",
     "surogate_core.runtime.team", "surogate.checkpoints.hf", "surogate_launch_env.join"]
)  # fmt: skip


@cache
def start_server() -> None:
    """Return when the server has imported what it forks. That takes most of the time of a run, and is no part of it."""
    first = _CONTEXT.Process(target=int)
    first.start()
    first.join()


VARIABLES: Mapping[str, Sequence[str]] = {
    "torchrun": ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "mpirun": (
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID"),
}
"""Of programs that start processes: how many there are, in all and here, and the index of a process among both."""

MORE: Mapping[str, Mapping[str, object]] = {
    "srun": {"SLURM_STEP_ID": 0, "SLURM_JOB_ID": 7, "SLURM_NODEID": 0, "SLURM_STEP_NODELIST": "localhost"}
}


def shorten_limits() -> None:
    """Let what is lost or stands still be noticed within seconds."""
    from surogate.world import processes, watch
    from surogate_core.api import tcp_store

    watch.BEAT_SECONDS, watch.GONE_SECONDS, watch.GRACE_SECONDS = 0.2, 1.0, 3.0
    tcp_store.LEAVE_SECONDS, tcp_store.ANSWER_SECONDS = 2.0, 5.0
    processes._CAUSE_SECONDS, processes._SIGNAL_SECONDS, processes._STILL_SECONDS = 5.0, 0.4, 0.5


def _train(root: str, rank: int, variables: dict[str, str], fault: str, short: bool, words: Sequence[str]) -> None:
    """Run `surogate train run.yaml` in a process that was forked from one that has imported torch."""
    from surogate.cli import app

    output = os.open(f"{root}/output{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if short:
        shorten_limits()
    exec(fault, {"rank": rank})
    sys.argv = ["surogate", "train", "run.yaml", *words]
    app.main()


@dataclass
class Several:
    """The processes of a run, in order. Their output goes to files."""

    workplace: Workplace
    processes: list[BaseProcess]

    def output(self, process: int) -> str:
        return (self.workplace.root / f"output{process}.txt").read_text()

    def log(self, process: int) -> str:
        """The lines that a process other than the writer has logged."""
        (path,) = self.workplace.out.glob(f"logs/rank_{process:05d}.log")
        return path.read_text()

    def errors(self) -> list[str]:
        """The error messages that all processes have shown."""
        return [line for process in range(len(self.processes)) for line in self.output(process).splitlines()
                if line.startswith("error: ")]  # fmt: skip

    def wait_for(self, pattern: str, process: int = 0) -> None:
        """Wait until a process has written what the pattern finds."""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, self.output(process)):
            assert time.monotonic() < deadline, f"no {pattern} in:\n{self.output(process)}"
            assert self.processes[process].is_alive() or re.search(pattern, self.output(process)), self.texts()
            time.sleep(0.02)

    def send(self, process: int, number: signal.Signals) -> None:
        os.kill(self.pid(process), number)

    def pid(self, process: int) -> int:
        pid = self.processes[process].pid
        assert pid is not None
        return pid

    def statuses(self, without: Sequence[int] = ()) -> list[int]:
        """Wait for the processes, and return their exit statuses."""
        found = []
        for process in (one for index, one in enumerate(self.processes) if index not in without):
            process.join(SECONDS)
            assert process.exitcode is not None, f"a process does not end:\n{self.texts()}"
            found.append(process.exitcode)
        return found

    def texts(self) -> str:
        return "\n".join(f"--- process {p}\n{self.output(p)}" for p in range(len(self.processes)))

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.workplace.out.glob("step_????????"))


@contextlib.contextmanager
def several(
    workplace: Workplace,
    count: int = 2,
    fault: str = "",
    *,
    short: bool = True,
    by: str = "torchrun",
    each: Sequence[Sequence[str]] = (),
    **config: object,
) -> Iterator[Several]:
    """Start `count` processes that train as one run; kill those that are left at the end.

    fault  code of each process
    short  with short limits instead of those of users
    by     the program whose variables they get
    each   further arguments of single processes
    """
    start_server()
    stall = {"stall_seconds": 30} if short else {}
    workplace.write(**{"max_steps": 100_000, "per_device_train_batch_size": 1, **stall, **config})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = Several(workplace, [])
    for rank in range(count):
        own = dict(zip(VARIABLES[by], (count, count, rank, rank), strict=True)) | MORE.get(by, {})
        given = {name: str(value) for name, value in own.items()}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables = environment(workplace.root) | given
        (workplace.root / f"output{rank}.txt").write_text("")
        words = each[rank] if each else ()
        process = _CONTEXT.Process(target=_train, args=(str(workplace.root), rank, variables, fault, short, words))
        process.start()
        run.processes.append(process)
    try:
        yield run
    finally:
        for process in run.processes:
            process.kill()
            process.join()


def trained(workplace: Workplace, count: int = 2, *, by: str = "torchrun", **config: object) -> Several:
    """Train with `count` processes to the end, and return them."""
    with several(workplace, count, short=False, by=by, **config) as run:
        assert run.statuses() == [0] * count, run.texts()
    return run
