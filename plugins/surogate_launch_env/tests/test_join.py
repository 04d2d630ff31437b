"""The devices of a process, and where the processes of a run meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from surogate_core.api import ConfigError, JoinContext, World
from surogate_launch_env.join import devices_of, join
from surogate_launch_env.place import find_place
from surogate_launch_env.rendezvous import find_rendezvous


def torchrun(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), **more}


def devices(environment: Mapping[str, str], gpus: int, **here: Any) -> list[int]:
    place = JoinContext(environment=environment, device_count=gpus, on_gpu=True, **here)
    return list(devices_of(place, find_place(environment)))


ALONE = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "gpus", "here", "expected"),
    [
        (torchrun(3, 4), 4, {}, [3]),
        (torchrun(3, 4), 1, {}, [0]),  # each sees its own
        (torchrun(3, 4), 4, {"wanted": 4}, [3]),
        (torchrun(3, 4), 4, {"wanted": 0}, [3]),
        (torchrun(3, 4), 2, {"ranks_per_device": 2}, [1]),
        (ALONE, 4, {}, [0]),
        (ALONE, 4, {"wanted": 3}, [0, 1, 2]),
        (ALONE, 4, {"wanted": 0}, [0, 1, 2, 3]),
    ],
)
def test_a_process_takes_its_gpu_or_all_of_a_machine_on_which_it_is_alone(
    environment: dict[str, str], gpus: int, here: dict[str, Any], expected: list[int]
) -> None:
    assert devices(environment, gpus, **here) == expected


@pytest.mark.parametrize(
    ("environment", "gpus", "here", "message"),
    [
        (torchrun(3, 4), 2, {}, "LOCAL_RANK is 3, but 2 GPUs are visible here: there are more processes (LOCAL_WORLD_"),
        (torchrun(0, 2), 8, {"wanted": 4}, "gpus is 4, but 2 processes run on this machine (LOCAL_WORLD_SIZE), and"),
        (torchrun(0, 2), 8, {"wanted": 0}, "gpus is 0, which means all 8, but 2 processes run on this machine"),
        (ALONE, 4, {"wanted": 5}, "gpus is 5, but 4 are visible here. Use gpus: 4, or 0 for all visible GPUs."),
    ],
)
def test_processes_and_gpus_that_do_not_fit_are_refused(
    environment: dict[str, str], gpus: int, here: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        devices(environment, gpus, **here)
    assert message in str(caught.value)


def test_a_process_without_a_gpu_is_a_cpu_and_no_more() -> None:
    place = find_place(ALONE)
    assert devices_of(JoinContext(environment=ALONE, device_count=1, on_gpu=False, wanted=0), place) == [0]
    with pytest.raises(ConfigError, match=r"gpus is 3, but no GPU is visible here, and only one CPU can train\."):
        devices_of(JoinContext(environment=ALONE, device_count=1, on_gpu=False, wanted=3), place)


def test_a_single_process_is_a_world_of_its_own() -> None:
    here = JoinContext(environment=torchrun(0, 1), device_count=4, on_gpu=True, wanted=2, ranks_per_device=2)
    world = join(here, 1)
    assert world == World(
        size=4, ranks=range(4), devices=[0, 0, 1, 1], started_by="torchrun (RANK, WORLD_SIZE)", store=world.store
    )


STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
MASTER = {"MASTER_ADDR": "a", "MASTER_PORT": "5"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "3"}


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        (STEP, ("the process of rank 0 at gpu07:22410", "123456.2")),
        (STEP | MASTER, ("the process of rank 0 at a:5", "123456.2")),
        (MPI | MASTER, ("the process of rank 0 at a:5", "")),
        (MPI | {"MPI_LOCALNRANKS": "2", "MASTER_PORT": "5"}, ("the process of rank 0 at 127.0.0.1:5", "")),
        (torchrun(1, 2) | MASTER, ("the process of rank 0 at a:5", "")),
        (torchrun(0, 2) | MASTER | AGENT, ("the agent of torchrun at a:5", "r/3")),
    ],
)
def test_the_address_comes_from_variables(environment: dict[str, str], address: tuple[str, str]) -> None:
    found = find_rendezvous(environment, find_place(environment), 1)
    assert (str(found.address), found.run, found.listening) == (*address, None)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            MPI,
            "MASTER_ADDR is not set: mpirun does not tell processes on several machines where rank 0 is. Set MASTER_",
        ),
        (MPI | {"MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (torchrun(0, 2), "MASTER_ADDR and MASTER_PORT not set, but WORLD_SIZE is 2. Set MASTER_ADDR to the machine of"),
        (torchrun(0, 2) | MASTER | {"MASTER_PORT": "0"}, "MASTER_PORT is 0, not a port (1 to 65535)"),
        (STEP | {"SLURM_STEP_NODELIST": "a["}, "'a[' is not a list of nodes"),
        (STEP | {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x', not a number"),
        (
            MPI | {"MPI_LOCALNRANKS": "2", "PMIX_NAMESPACE": "none such"},
            "surogate-0-none_such within 0.2 s. If it runs, then with another TMPDIR, or under a script. Set MASTER_",
        ),
    ],
)
def test_an_address_that_cannot_be_known_is_an_error(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        join(JoinContext(environment=environment, device_count=1, on_gpu=False), 0.2)
    assert str(caught.value).startswith("launcher: env: ") and message in str(caught.value)
