"""The meeting of the processes of a run: the address of the store, and who holds it."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from surogate_core.api import ConfigError
from surogate_core.api.tcp_store import Address, listen

from .nodelist import expand
from .place import SLURM, TORCHRUN, Environment, Place, number

REMEDY: Final = (
    "Set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a port that is free there, the same in all processes."
)
LOOPBACK: Final = "127.0.0.1"
FIRST_PORT, PORTS = 17000, 12000
"""Ports for runs of Slurm: below those that Linux gives to connections (32768), and not torch's default (29500)."""


@dataclass(frozen=True)
class Rendezvous:
    """run: tells runs apart that share a server. listening: the socket of the store if this process holds it."""

    address: Address
    run: str
    listening: socket.socket | None
    end: Callable[[], None] = lambda: None
    """To call when all processes have joined, or have failed to."""


def find_rendezvous(environment: Environment, place: Place, seconds: float) -> Rendezvous:
    """Return where the processes of the run meet. Raises ConfigError if that cannot be known, or if a port is taken."""
    if place.starter is TORCHRUN:
        return _of_torchrun(environment, place)
    host = environment.get("MASTER_ADDR", "")
    one_machine = place.on_node == place.size
    if place.starter is SLURM:
        job, step = (number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        nodes = environment.get("SLURM_STEP_NODELIST", "")
        host = host or (LOOPBACK if one_machine else expand(nodes)[0])
        port = _port(environment) or FIRST_PORT + (job + 977 * step) % PORTS
        return _at(Address(host, port, remedy=REMEDY), f"{job}.{step}", place)
    port = _port(environment)
    if port and (host or one_machine):
        return _at(Address(host or LOOPBACK, port, remedy=REMEDY), environment.get("PMIX_NAMESPACE", ""), place)
    if one_machine and not host:
        return _published(_run_of_mpi(environment), place, seconds)
    missing = "MASTER_ADDR" if not host else "MASTER_PORT"
    raise ConfigError(
        f"{missing} is not set: mpirun does not tell processes on several machines where rank 0 is. {REMEDY}"
    )


def _of_torchrun(environment: Environment, place: Place) -> Rendezvous:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not set, but {place.starter.size} is {place.size}. {REMEDY}")
    host, port = environment["MASTER_ADDR"], _port(environment)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _at(Address(host, port, remedy=REMEDY), "", place)
    run = f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    # The agent holds the store, in which the keys of all attempts stay, and its port is taken.
    return Rendezvous(Address(host, port, "the agent of torchrun", "Is torchrun still running?"), run, None)


def _at(address: Address, run: str, place: Place) -> Rendezvous:
    return Rendezvous(address, run, listen(address) if place.rank == 0 else None)


def _port(environment: Environment) -> int:
    """Return MASTER_PORT, 0 if it is not set."""
    if not environment.get("MASTER_PORT"):
        return 0
    port = number(environment, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT is {port}, not a port (1 to 65535).")
    return port


def _run_of_mpi(environment: Environment) -> str:
    """Return a word for this start of mpirun, the same in all its processes of a machine."""
    # MPICH's and Intel's daemons name no job, but they are the parent of all processes of a machine.
    return environment.get("PMIX_NAMESPACE") or f"parent-{os.getppid()}"


def _published(run: str, place: Place, seconds: float) -> Rendezvous:
    """Let the process of rank 0 listen at a free port, which it writes to a file that is named after the job.

    A port derived from the job's name could be another's, and mpirun's name of a job says nothing about free ports.
    """
    path = Path(tempfile.gettempdir(), f"surogate-{os.getuid()}-{re.sub(r'[^0-9A-Za-z-]', '_', run)}")
    if place.rank == 0:
        listening = listen(Address(LOOPBACK, 0))
        port = listening.getsockname()[1]
        try:
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}-", delete=False) as file:
                file.write(str(port))
            os.replace(file.name, path)
        except OSError as error:
            raise ConfigError(f"cannot write the port of rank 0 to {path}: {error.strerror}. {REMEDY}") from None
        return Rendezvous(Address(LOOPBACK, port), run, listening, lambda: path.unlink(missing_ok=True))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # A file that an earlier job of this name has left leads nowhere: read it again.
        with suppress(OSError, ValueError):
            if path.lstat().st_uid == os.getuid():
                port = int(path.read_text())
                socket.create_connection((LOOPBACK, port), timeout=1).close()
                return Rendezvous(Address(LOOPBACK, port), run, None)
        time.sleep(0.05)
    raise ConfigError(
        f"the process of rank 0 did not write its port to {path} within {seconds:g} s. If it runs, then with another "
        f"TMPDIR, or under a script. {REMEDY}"
    )
