"""The place of this process among those that torchrun, MPI or Slurm has started: from environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from surogate_core.api import ConfigError

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Starter:
    """A program that starts processes, and the variables by which it tells a process where it is.

    rank, size      index of the process and number of processes
    local, on_node  the same within its machine
    """

    title: str
    rank: str
    size: str
    local: str
    on_node: str

    def __str__(self) -> str:
        return f"{self.title} ({self.rank}, {self.size})"

    def given(self, environment: Environment) -> list[str]:
        """Return those of `rank` and `size` that are set."""
        # A batch script of Slurm has SLURM_PROCID and SLURM_NTASKS too, but is no step: it runs once.
        if self is SLURM and not environment.get("SLURM_STEP_ID"):
            return []
        return [name for name in (self.rank, self.size) if environment.get(name)]


TORCHRUN: Final = Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI: Final = Starter(
    "Open MPI",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
MPI: Final = Starter("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM: Final = Starter("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")

STARTERS: Final = (TORCHRUN, OPEN_MPI, MPI, SLURM)
"""From the innermost to the outermost: torchrun runs inside of a step of Slurm, and so does mpirun."""


@dataclass(frozen=True)
class Place:
    """rank, size: index of the process and number of processes. local, on_node: the same within its machine."""

    starter: Starter
    rank: int
    size: int
    local: int
    on_node: int


def recognised(environment: Environment) -> str:
    """Return the variables that say that this process is one of several, even if one of them is missing."""
    for starter in STARTERS:
        given = starter.given(environment)
        if len(given) == 2:
            return "" if environment[starter.size] == "1" else ", ".join(given)
        if given and environment.get(starter.size) != "1":
            return given[0]
    return ""


def find_place(environment: Environment) -> Place:
    """Return the place of this process. Raises ConfigError, naming the variables, if they are incomplete or wrong."""
    starter = _starter(environment)
    rank, size = (number(environment, name) for name in (starter.rank, starter.size))
    if not rank < size:
        raise ConfigError(
            f"{starter.rank} is {rank} and {starter.size} is {size}: of {size} processes the last is "
            f"{size - 1}. Correct one of them."
        )
    local, on_node = _on_node(environment, starter, size)
    if not local < on_node <= size:
        raise ConfigError(
            f"{starter.local} is {local}, {starter.on_node} is {on_node} and {starter.size} is {size}: "
            "they contradict each other. Correct one of them."
        )
    return Place(starter, rank, size, local, on_node)


def number(environment: Environment, name: str) -> int:
    """Return the number in a variable that is set."""
    if not re.fullmatch(r"\d+", environment[name].strip()):
        raise ConfigError(f"{name} is {environment[name]!r}, not a number.")
    return int(environment[name])


def _starter(environment: Environment) -> Starter:
    given = {starter: names for starter in STARTERS if (names := starter.given(environment))}
    complete = [starter for starter, names in given.items() if len(names) == 2]
    if MPI in complete and SLURM in complete and not environment.get(MPI.local):
        complete.remove(MPI)  # srun speaks PMI with its tasks, and sets the same numbers twice
    found = complete[0] if complete else None
    for starter in STARTERS[: STARTERS.index(found) if found else None]:
        for name in given.get(starter, ()):
            counterpart = (found.rank if name == starter.rank else found.size) if found else ""
            if not counterpart or environment[name] != environment[counterpart]:
                other = starter.size if name == starter.rank else starter.rank
                but = f", and {counterpart} is {environment[counterpart]}" if counterpart else ""
                raise ConfigError(
                    f"{name} is {environment[name]}, but {other} is not set{but}. Set both, or unset {name}."
                )
    if found is None:
        each = "; ".join(f"{starter.rank} and {starter.size} of {starter.title}" for starter in STARTERS)
        raise ConfigError(
            f"none of its variables is set ({each}). Start the run with torchrun, mpirun or srun, or "
            "use launcher: auto."
        )
    if {OPEN_MPI, MPI} <= set(complete) and found is OPEN_MPI:
        for ours, theirs in ((OPEN_MPI.rank, MPI.rank), (OPEN_MPI.size, MPI.size)):
            if environment[ours] != environment[theirs]:
                raise ConfigError(
                    f"{ours} is {environment[ours]}, but {theirs} is {environment[theirs]}: two "
                    "programs have started this process. Unset the variables of one of them."
                )
    return found


def _on_node(environment: Environment, starter: Starter, size: int) -> tuple[int, int]:
    """Return the index of the process within its machine, and the number of processes there."""
    missing = [name for name in (starter.local, starter.on_node) if not environment.get(name)]
    if len(missing) == 2 and (size == 1 or starter is TORCHRUN):
        return 0, 1  # Operators of Kubernetes start one process a machine, and do not say so.
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but "
            f"{starter.size} is {size}: which GPU is this process's? Set {starter.local} to its index within its "
            f"machine and {starter.on_node} to the number of processes there."
        )
    if starter is SLURM:
        return number(environment, starter.local), _tasks_here(environment)
    return number(environment, starter.local), number(environment, starter.on_node)


def _tasks_here(environment: Environment) -> int:
    """Return the tasks of this machine from "2(x3),1": two on each of three nodes and one on the fourth."""
    name, node = SLURM.on_node, "SLURM_NODEID"
    counts: list[int] = []
    for part in environment[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ConfigError(f"{name} is {environment[name]!r}, not numbers such as 2(x3),1.")
        counts += [int(found[1])] * int(found[2] or 1)
    if not environment.get(node):
        raise ConfigError(f"{node} is not set, but SLURM_STEP_ID is. Start the run with srun.")
    index = number(environment, node)
    if index >= len(counts):
        raise ConfigError(f"{node} is {index}, but {name} is {environment[name]}: the tasks of {len(counts)} nodes.")
    return counts[index]
