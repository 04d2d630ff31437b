"""The thread that watches a run: it writes this process's heartbeat, and notices who fails, is gone or stands still.

Each process watches the next one, so that a machine that fails is noticed from another one, and hundreds of processes
ask the store little. Process 0 looks at all, once it has stood still itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from surogate_core.api import StoreLost, World
from surogate_core.api.members import numbers
from surogate_core.errors import ConfigError, RunLost, RunStopped, SurogateError

from .heartbeat import Heartbeat, Peer, RankAt

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""

GONE_SECONDS = 6.0
"""A process that has been silent for so long is gone, unless it lives on this machine."""

GRACE_SECONDS = 5.0
"""For which this process may go on after the run has failed, before it is ended. A save may be finished."""

_SETTLE = 2.5
"""Heartbeats for which the others are watched when one is gone, because several may be."""

_ENDING = 2.0
"""Seconds for which a killed process may still count as running after its connections are closed."""

_HANG_SECONDS = 2.0
"""For which a process that hangs may still write why it ends."""

_FAILED = "failed"


class Watched(Protocol):
    """The process as the watch sees it: its heartbeat, and something that changes when it comes further."""

    def heartbeat(self, count: int, idle: float, ended: bool) -> Heartbeat: ...
    def moves(self) -> object: ...
    @property
    def saving(self) -> bool: ...
    def log(self, line: str) -> None: ...


class Watch:
    """Watches a run until `end`. `found` is set when the run has failed: `failure` says why, and `told` whether another
    process shows it."""

    def __init__(self, world: World, watched: Watched, stall_seconds: float) -> None:
        self.world = world
        self.failure: SurogateError | None = None
        self.told = False
        self.found = threading.Event()
        self.on_failure: list[Callable[[], None]] = []
        self.on_hang: list[Callable[[SurogateError], None]] = []
        self._over = threading.Event()
        self._watched, self._stall_seconds = watched, stall_seconds
        self._count, self._idle, self._last = 0, 0.0, object()
        self._peers = {process: Peer() for process in range(world.processes)}
        self._beating = threading.Lock()
        self._interrupting = threading.Lock()
        self._may_interrupt = True
        threading.Thread(target=self._run, name="surogate-watch", daemon=True).start()

    def end(self) -> None:
        """Stop to watch. The others see that this process ends on purpose."""
        self._over.set()
        try:
            self._write(ended=True)
        except StoreLost:
            if not self.told:  # others of this machine must see that this one lives, and shows the error
                time.sleep(2 * BEAT_SECONDS)

    def stop_interrupting(self) -> None:
        """Leave the main thread alone from now on: it ends by itself. One signal may already be on its way to it."""
        with self._interrupting:
            self._may_interrupt = False

    def post(self, text: str, status: int, shown_by: int, lost: bool = True) -> bool:
        """Tell the other processes that the run has failed. Return whether the store has it; the first failure counts.

        `lost`: as a `RunLost`.
        """
        with suppress(StoreLost, TimeoutError):
            if self.world.store.add(f"{_FAILED}/count", 1) == 1:  # later errors may be consequences
                self.world.store.set(_FAILED, json.dumps([text, status, shown_by, lost]).encode())
            return True
        return False

    def _run(self) -> None:
        before, failure = time.monotonic(), None
        while failure is None and not self._over.wait(0 if not self._count else BEAT_SECONDS):
            now = time.monotonic()
            # A process that was stopped for an hour has not waited for an hour.
            seconds, before = min(now - before, 2 * BEAT_SECONDS), now
            try:
                moves = self._watched.moves()
                self._idle, self._last = (0.0 if moves != self._last else self._idle + seconds), moves
                self._write()
                self._hear(self._near, seconds)
                failure = self._posted() or self._lost_process() or self._stalled(seconds)
            except StoreLost as lost:
                failure = self._lost_store(lost)
            except TimeoutError:
                continue
        if failure is not None and not self._over.is_set():
            self._stop(failure)

    def _write(self, ended: bool = False) -> None:
        with self._beating:
            if not (self._over.is_set() and not ended):
                self._count += 1
                beat = self._watched.heartbeat(self._count, self._idle, ended)
                self.world.store.set(f"alive/{self.world.process}", beat.encoded())

    # ------------------------------------------------------------------------------------------------ what may be wrong

    def _posted(self) -> SurogateError | None:
        if not self.world.store.has(_FAILED):
            return None
        text, status, shown_by, lost = json.loads(self.world.store.get(_FAILED, BEAT_SECONDS))
        failure = (ConfigError if status == ConfigError.exit_code else RunLost if lost else RunStopped)(text)
        failure.exit_code = status
        self.told = shown_by != self.world.process
        return failure

    @property
    def _following(self) -> int:
        return (self.world.process + 1) % self.world.processes

    @property
    def _near(self) -> list[int]:
        """The processes that this one hears at each beat: process 0, the next one, and those that it has not heard."""
        return [p for p, peer in self._peers.items() if p in (0, self._following) or peer.beat is None]

    def _lost_process(self) -> SurogateError | None:
        """Report that the next process is gone, and those that are gone with it."""
        following = self._following
        if following == self.world.process or not self._peers[following].is_gone(GONE_SECONDS):
            return None
        self._hear(self._peers, 0.0)  # it may have said that it leaves the run
        others = {process: peer for process, peer in self._peers.items() if process != self.world.process}
        gone = {process: peer for process, peer in others.items() if peer.is_known_gone}
        if following not in gone:
            if self._over.wait(_SETTLE * BEAT_SECONDS):
                return None
            self._hear(self._peers, _SETTLE * BEAT_SECONDS)
            gone = {process: peer for process, peer in others.items() if peer.is_gone(2 * BEAT_SECONDS)}
            if following not in gone:
                return self._posted()
        living = min(process for process in self._peers if process not in gone)
        self.post(f"{_obituary(gone)} {self._checkpoint()} Stopping.", RunStopped.exit_code, living)
        return self._posted()

    def _stalled(self, seconds: float) -> SurogateError | None:
        """Report that all processes have stood still for longer than any of their sections allows."""
        me = self._watched.heartbeat(0, self._idle, ended=False)
        if self.world.process or self._idle <= me.limit:
            return None
        self._hear(self._peers.keys() - self._near, seconds)
        beats = [peer.beat for peer in self._peers.values() if peer.beat is not None]
        limit = max(beat.limit for beat in beats)
        if min(peer.idle for peer in self._peers.values()) <= limit or any(beat.ended for beat in beats):
            return None
        self.post(stall_report(self._peers, self._stall_seconds), RunStopped.exit_code, 0)
        return self._posted()

    def _lost_store(self, lost: StoreLost) -> SurogateError:
        """Without the store the processes cannot agree who shows it: the first living one of each machine does."""
        beats = {process: peer.beat for process, peer in self._peers.items() if peer.beat is not None}
        first, deadline = beats.get(0), time.monotonic() + _ENDING
        while first and first.fate == "running" and time.monotonic() < deadline and not self._over.wait(_ENDING / 100):
            pass
        living = [process for process, beat in beats.items() if beat.fate == "running"]
        self.told = min([*living, self.world.process]) != self.world.process
        # How a connection breaks differs between processes. What is known of process 0 does not.
        why = f"{described(0, first)} {_FATES[first.fate]}" if first and first.fate in _FATES else f"{lost}"
        return RunLost(f"{why}. This process stops, because nobody would save what it trains. {self._checkpoint()}")

    def _checkpoint(self) -> str:
        return last_checkpoint({p: peer.beat for p, peer in self._peers.items() if peer.beat is not None})

    def _hear(self, processes: Iterable[int], seconds: float) -> None:
        for process in processes:
            value = None
            with suppress(TimeoutError):
                value = self.world.store.get(f"alive/{process}", 0)
            self._peers[process].hear(value, seconds)

    # ---------------------------------------------------------------------------------------------------------- the end

    def _stop(self, failure: SurogateError) -> None:
        """Free what waits for other ranks; interrupt the main thread if it goes on, and end the process if it hangs."""
        self.failure = failure
        self.found.set()
        for act in self.on_failure:
            with suppress(Exception):
                act()
        waited = 0
        while not self._over.wait(GRACE_SECONDS / 2):
            waited = 0 if self._watched.saving else waited + 1
            if waited == 1:
                with self._interrupting:
                    if self._may_interrupt:
                        interrupt_main(signal.SIGTERM)  # runs a handler of Python, if there is one
            elif waited == 2:
                self._hung(failure)
                self._watched.log(f"error: {failure}")
                if not self.told:
                    print(f"error: {failure}", file=sys.stderr)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failure.exit_code)

    def _hung(self, failure: SurogateError) -> None:
        """Call what is to be done before a process that hangs is ended. It may hang too, so it gets some seconds."""

        def act() -> None:
            for one in self.on_hang:
                with suppress(Exception):
                    one(failure)

        thread = threading.Thread(target=act, name="surogate-hang", daemon=True)
        thread.start()
        thread.join(_HANG_SECONDS)


_FATES = {"gone": "is gone: it was killed, or has crashed", "stopped": "is stopped (by SIGSTOP, or a debugger)"}


def _obituary(gone: dict[int, Peer]) -> str:
    """Return why processes are lost, and where they were."""
    texts = []
    for process, peer in gone.items():
        if peer.beat is None:
            texts.append(f"process {process} has not begun after {peer.silent:.0f} s.")
        else:
            silent = f"has been silent for {peer.silent:.0f} s: it is gone, or its machine cannot be reached"
            fate = _FATES.get(peer.beat.fate, silent)
            texts.append(f"{described(process, peer.beat)} {fate}. It was at: {peer.beat.at}.")
    return " ".join(texts)


_MOST_HOSTS = 3
"""Ranks of which the report tells where they are."""


def stall_report(peers: Mapping[int, Peer], stall_seconds: float) -> str:
    """Return the report on processes that have all stood still for longer than their sections allow: which rank has not
    come, what the others wait for, and where it is."""
    beats = {process: peer.beat for process, peer in peers.items() if peer.beat is not None}
    late, reason = _late_ranks(beats) or _late_processes(beats)
    seconds = min(peer.idle for peer in peers.values())
    beat = beats[late]
    remedy = f" If nothing is wrong, raise stall_seconds ({stall_seconds:g})." if beat.limit == stall_seconds else ""
    where, checkpoint = _place(beat, beats), last_checkpoint(beats)
    return f"{where}: {reason} since {seconds:.0f} s.{_state(beat)} {checkpoint} Stopping.{remedy}"


def last_checkpoint(beats: Mapping[int, Heartbeat]) -> str:
    saved = next((beat.checkpoint for beat in beats.values() if beat.checkpoint), "")
    return f"Last complete checkpoint: {saved}." if saved else "No checkpoint is known to be complete."


def described(process: int, beat: Heartbeat) -> str:
    """Return "process 1 (ranks 2, 3, pid 17 on host)"."""
    ranks = f"{numbered('rank', [rank.rank for rank in beat.ranks])}, " if beat.ranks else ""
    return f"process {process} ({ranks}pid {beat.pid} on {beat.host})"


def numbered(word: str, ints: Sequence[int]) -> str:
    """Return "rank 5" or "ranks 0-3, 7"."""
    plural = "es" if word.endswith("s") else "s"
    return f"{word}{plural if len(ints) > 1 else ''} {numbers(ints)}"


def _late_ranks(beats: Mapping[int, Heartbeat]) -> tuple[int, str] | None:
    """Return the process of a late rank, and what the late ranks do, if some ranks wait in a collective."""
    ranks = [(process, rank) for process, beat in beats.items() for rank in beat.ranks]
    inside = [rank for _, rank in ranks if rank.inside]
    if not inside:
        return None
    late = [(process, rank) for process, rank in ranks if not rank.inside]
    name = inside[0].name
    if not late:
        differ = {rank.name: rank for _, rank in ranks}
        if len(differ) == 1:
            return ranks[0][0], f"all ranks are in {name}, which does not end: look at what connects them,"
        return ranks[0][0], "; ".join(f"rank {rank.rank} is in {name}" for name, rank in differ.items())
    process, rank = late[0]
    where = f"{beats[process].host}, device {rank.device}"
    who = f"rank {rank.rank} ({where})" if len(late) == 1 else numbered("rank", [rank.rank for _, rank in late])
    has = "has" if len(late) == 1 else "have"
    wait = numbered("rank", [rank.rank for rank in inside])
    waiting = f"{wait} {'wait' if len(inside) > 1 else 'waits'} for it"
    return process, f"{who} {has} not entered {name}; {waiting}"


def _late_processes(beats: Mapping[int, Heartbeat]) -> tuple[int, str]:
    """Return a process that the others wait for, and what for."""
    waiting = [process for process, beat in beats.items() if beat.waits]
    late = [process for process in beats if process not in waiting]
    if not late or not waiting:
        places = "; ".join(f"process {process}: {_place(beat, {})}" for process, beat in beats.items())
        return (late or waiting)[0], f"no process has come further ({places})"
    who = described(late[0], beats[late[0]]) if len(late) == 1 else numbered("process", late)
    wait = f"process {waiting[0]} waits" if len(waiting) == 1 else f"{numbered('process', waiting)} wait"
    has = "has" if len(late) == 1 else "have"
    return late[0], f"{who} {has} not reached {beats[waiting[0]].waits}; {wait} for it"


def _place(beat: Heartbeat, beats: Mapping[int, Heartbeat]) -> str:
    """Return the step and the micro-step: of ranks that wait in a collective, else that of the process itself."""
    waiting = [rank.micro_step for other in beats.values() for rank in other.ranks if rank.micro_step and rank.inside]
    micro_step = waiting or [rank.micro_step for rank in beat.ranks if rank.micro_step]
    return f"{beat.at}, micro-step {micro_step[0]}" if micro_step and beat.at.startswith("step ") else beat.at


def _state(beat: Heartbeat) -> str:
    """Return where the late ranks of a process are: " Rank 5: in load (loader.py:12)."."""
    if beat.fate in ("gone", "stopped"):
        return f" Its process is {beat.fate}."
    late: list[RankAt] = [rank for rank in beat.ranks if rank.host and not rank.inside]
    return "".join(f" Rank {rank.rank}: in {rank.host}." for rank in late[:_MOST_HOSTS])
