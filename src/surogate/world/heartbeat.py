"""The heartbeat of a process: where it is and how far its ranks have come, written to the store each second."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

from surogate_core.api import World
from surogate_core.api.world import Position

_LOOP = "surogate_core.runtime.threads"
"""The module in which the thread of a rank waits for work."""


@dataclass(frozen=True, kw_only=True)
class RankAt:
    """A rank: its device, its micro-step, and the collective `name` that it entered last and is `inside` of or not.

    moves  changes whenever it comes further
    host   the function that its thread is in; "" unless it stands still
    """

    rank: int
    device: int
    moves: int = 0
    micro_step: int = 0
    name: str = ""
    inside: bool = False
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A process at a moment.

    at, limit   its section, and the seconds that it may stand still there
    waits       for what it waits that another process does; ""
    idle        seconds since it, or a rank of it, came further
    checkpoint  the last one that it has completed; ""
    ended       whether it has left the run
    """

    count: int
    at: str
    limit: float
    waits: str = ""
    idle: float = 0.0
    checkpoint: str = ""
    ended: bool = False
    ranks: Sequence[RankAt] = ()
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=lambda: this_machine())  # type: ignore[has-type]
    pid: int = field(default_factory=os.getpid)
    born: str = field(default_factory=lambda: _state(os.getpid())[1])

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, value: bytes) -> Heartbeat:
        fields = json.loads(value)
        return cls(**fields | {"ranks": [RankAt(**rank) for rank in fields["ranks"]]})

    @property
    def fate(self) -> str:
        """ "running", "stopped" or "gone"; "" on another machine, where it is not known."""
        if self.machine != this_machine():
            return ""
        state, born = _state(self.pid)
        if born != self.born or state in ("Z", "X"):
            return "gone"
        return "stopped" if state == "T" else "running"


class Peer:
    """Another process, as its heartbeats show it. silent: seconds since the last one."""

    def __init__(self) -> None:
        self.beat: Heartbeat | None = None
        self.silent = 0.0

    def hear(self, value: bytes | None, seconds: float) -> None:
        """Take over a heartbeat that was read `seconds` after the one before."""
        beat = Heartbeat.decoded(value) if value else None
        if beat is not None and (self.beat is None or beat.count != self.beat.count):
            self.beat, self.silent = beat, 0.0
        else:
            self.silent += seconds

    @property
    def idle(self) -> float:
        return self.silent + (self.beat.idle if self.beat else 0.0)

    @property
    def is_known_gone(self) -> bool:
        """Whether it was a process of this machine, and has not left the run on purpose."""
        return self.beat is not None and not self.beat.ended and self.beat.fate == "gone"

    def is_gone(self, seconds: float) -> bool:
        """Return whether the process is gone, or stopped, or was silent for `seconds` on another machine.

        One that lives here and is silent, because a call holds the interpreter, is given the limit of its section.
        """
        if self.beat is None or self.beat.ended:
            return self.beat is None and self.silent > seconds
        fate = self.beat.fate
        limit = self.beat.limit if fate == "running" else seconds
        return fate == "gone" or self.silent > max(limit, seconds)


def ranks_at(world: World, positions: Sequence[Position], *, still: bool) -> Iterator[RankAt]:
    """Yield the ranks of this process; with the functions that their threads are in if they stand `still`."""
    for rank, device, position in zip(world.ranks, world.devices, positions, strict=False):
        moves, micro_step, name, inside = position.read()
        host = (_function(f"surogate-rank-{rank}") or _function("MainThread")) if still else ""
        yield RankAt(rank=rank, device=device, moves=moves, micro_step=micro_step, name=name, inside=inside, host=host)


@cache
def this_machine() -> str:
    """Return a word that processes which see each other's process ids have in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _state(pid: int) -> tuple[str, str]:
    """Return the state of a process of this machine ("T": stopped), and when it was started. "X", "": it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


def _function(thread: str) -> str:
    """Return the innermost function of a thread that is not Python's or torch's: "load (loader.py:12)"; "" if idle."""
    frames = sys._current_frames()
    frame = next((frames.get(one.ident or 0) for one in threading.enumerate() if one.name == thread), None)
    while frame is not None and _is_foreign(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _is_foreign(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    package = module.partition(".")[0]
    return module == _LOOP or package == "torch" or package in sys.stdlib_module_names
