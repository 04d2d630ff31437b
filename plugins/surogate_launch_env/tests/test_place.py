"""What the variables of torchrun, MPI and Slurm say, and what is wrong with them."""

from __future__ import annotations

import pytest

from surogate_core.api import ConfigError
from surogate_launch_env.nodelist import expand
from surogate_launch_env.place import find_place, recognised

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("environment", "by", "place"),
    [
        (TORCHRUN, "RANK, WORLD_SIZE", (3, 8, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE", (1, 2, 0, 1)),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE", (5, 6, 2, 3)),
        (MPICH, "PMI_RANK, PMI_SIZE", (1, 4, 1, 4)),
        (STEP, "SLURM_PROCID, SLURM_STEP_NUM_TASKS", (4, 5, 0, 1)),
        (STEP | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}, "SLURM_PROCID", (1, 5, 1, 2)),
        # The innermost counts: torchrun in a step, mpirun in a step, MPI's variables from srun itself.
        (STEP | TORCHRUN, "RANK, WORLD_SIZE", (3, 8, 1, 2)),
        (STEP | MPICH, "PMI_RANK, PMI_SIZE", (1, 4, 1, 4)),
        (STEP | {"PMI_RANK": "4", "PMI_SIZE": "5"}, "PMI_RANK, PMI_SIZE", (4, 5, 0, 1)),
        (BATCH | OPEN_MPI, "OMPI_COMM_WORLD_RANK", (5, 6, 2, 3)),
        (OPEN_MPI | {"PMI_RANK": "5", "PMI_SIZE": "6"}, "OMPI_COMM_WORLD_RANK", (5, 6, 2, 3)),
        # A script that exports a part of torchrun's variables before srun.
        (STEP | {"WORLD_SIZE": "5"}, "WORLD_SIZE", (4, 5, 0, 1)),
    ],
)
def test_variables_say_where_a_process_is(environment: dict[str, str], by: str, place: tuple[int, ...]) -> None:
    assert recognised(environment).startswith(by)
    found = find_place(environment)
    assert (found.rank, found.size, found.local, found.on_node) == place


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"RANK": ""},
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_is_not_recognised(environment: dict[str, str]) -> None:
    assert recognised(environment) == ""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "none of its variables is set (RANK and WORLD_SIZE of torchrun; OMPI_COMM_WORLD_RANK and"),
        (BATCH, "none of its variables is set"),
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set. Set both, or unset RANK."),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set. Set both, or unset WORLD_SIZE."),
        (
            STEP | {"WORLD_SIZE": "2"},
            "WORLD_SIZE is 2, but RANK is not set, and SLURM_STEP_NUM_TASKS is 5. Set both, or unset WORLD_SIZE.",
        ),
        (BATCH | {"SLURM_STEP_ID": "0"}, "SLURM_PROCID is 0, but SLURM_STEP_NUM_TASKS is not set"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8 and WORLD_SIZE is 8: of 8 processes the last is 7. Correct one of them."),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1', not a number."),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number."),
        (
            TORCHRUN | {"LOCAL_RANK": "2"},
            "LOCAL_RANK is 2, LOCAL_WORLD_SIZE is 2 and WORLD_SIZE is 8: they contradict each other",
        ),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": ""},
            "LOCAL_WORLD_SIZE is not set, but WORLD_SIZE is 8: which GPU is this process's? Set LOCAL_RANK to its",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "MPI_LOCALRANKID and MPI_LOCALNRANKS are not set, but PMI_SIZE is 4"),
        (
            OPEN_MPI | {"PMI_RANK": "5", "PMI_SIZE": "3"},
            "OMPI_COMM_WORLD_SIZE is 6, but PMI_SIZE is 3: two programs have started this process. Unset the",
        ),
        (STEP | {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, but SLURM_STEP_TASKS_PER_NODE is 2(x2),1: the tasks of 3"),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "2x2"},
            "SLURM_STEP_TASKS_PER_NODE is '2x2', not numbers such as 2(x3),1",
        ),
    ],
)
def test_variables_that_are_missing_or_wrong_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_place(environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("localhost", "localhost"),
        ("a,b", "a b"),
        ("a[1-3,7],b05", "a1 a2 a3 a7 b05"),
        ("gpu[008-011]", "gpu008 gpu009 gpu010 gpu011"),
        ("rack[0-1]n[09-10].x", "rack0n09.x rack0n10.x rack1n09.x rack1n10.x"),
        ("a-b-[2],c", "a-b-2 c"),
    ],
)
def test_a_list_of_nodes_is_expanded_in_its_order(text: str, names: str) -> None:
    assert expand(text) == names.split()


@pytest.mark.parametrize("text", ["", "a[", "a]", "a[1-", "a[x]", "a[]", "a[1,]", "a,,b"])
def test_text_that_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a list of nodes such as gpu\[01-04,7\]"):
        expand(text)
