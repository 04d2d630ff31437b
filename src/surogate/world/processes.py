"""Decisions, exchanges and comparisons of the processes of a run. A run of one process exchanges nothing.

All processes make the same calls in the same order; the n-th call of one meets the n-th of the others. Values go
through the store, never through a collective: they are exchanged between steps and where no device has work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from surogate_core.api import StoreLost, World
from surogate_core.api.world import CollectiveError, Position
from surogate_core.errors import ConfigError, RunLost, RunStopped, SurogateError

from .heartbeat import Heartbeat, ranks_at
from .watch import BEAT_SECONDS, GONE_SECONDS, Watch

PATIENCE = 3600.0
"""Seconds that a process waits for the others. The watch ends a run that stands still much earlier."""

STALL_SECONDS = 60.0
"""Default of the key `stall_seconds`: for so long all ranks may stand still, unless a section says otherwise."""

START_SECONDS, LOAD_SECONDS, FIRST_STEP_SECONDS, SAVE_SECONDS = 600.0, 3600.0, 300.0, 600.0
"""Limits of other sections: the start, loading of weights, the first step, and saves, besides the time of writing."""

SLOWEST_WRITES = 50e6
"""Bytes a second that a save takes at most to write."""

_POLL = 0.5
"""Seconds between two looks at whether another process has failed."""

_CAUSE_SECONDS = 2 * GONE_SECONDS + 3 * BEAT_SECONDS
"""For which a process waits for the cause of an error that may be the consequence of another's."""

_SIGNAL_SECONDS = 2 * BEAT_SECONDS
"""The same for a signal: what has started the processes ends them when one is gone."""

_STILL_SECONDS = 3.0
"""After which a heartbeat says which functions the threads of ranks are in."""

_MEETING = 1024
"""Calls after which all processes wait for each other, so that the keys of earlier calls can be removed."""

_ASKED = "asked"


class _Difference(ConfigError):
    """All processes raise it, so none tells the others."""


class Processes:
    """The processes of a world. `check` raises RunStopped if the run has failed elsewhere; so do all calls that wait.

    The run is watched if it has several ranks: see `Watch`.
    """

    def __init__(self, world: World, stall_seconds: float = STALL_SECONDS) -> None:
        self.world = world
        self.alone = world.processes == 1
        self.checkpoint = ""  # the name of the last complete one
        self.log: Callable[[str], None] = lambda line: None
        self.positions: Sequence[Position] = [Position() for _ in world.ranks]  # of its ranks
        self._stall_seconds = stall_seconds
        self._raised: BaseException | None = None
        self._waits, self._moves, self._limit = "", 0, 0.0
        self._calls: dict[str, int] = {}
        self.at("the start", START_SECONDS)
        self._watch = None if world.size == 1 else Watch(world, self, stall_seconds)

    # ------------------------------------------------------------------------------------------------------ exchange

    def share(self, value: Any, what: str, seconds: float = PATIENCE, series: str = "") -> Any:
        """Return the value of the writer, of JSON types, in every process. Those of the others are ignored.

        Calls of a `series` meet calls of the same one. Each thread that exchanges values has one of its own.
        """
        if self.alone:
            return value
        if self.world.writer:
            self._set(f"{self._call(series)}/0", value)
            return value
        return self._get(f"{self._call(series)}/0", 0, what, seconds, series)

    def gather(self, value: Any, what: str, seconds: float = PATIENCE) -> list[Any]:
        """Return the values of all processes, of JSON types, in their order."""
        return self._gather(value, what, seconds, "", self.world.processes)

    def report(self, value: Any, what: str, series: str, seconds: float = PATIENCE) -> list[Any]:
        """Return the values of all processes, as `gather`, to the writer. The others do not wait, and get no value."""
        return self._gather(value, what, seconds, series, self.world.processes if self.world.writer else 0)

    def _gather(self, value: Any, what: str, seconds: float, series: str, count: int) -> list[Any]:
        if self.alone:
            return [value]
        call = self._call(series)
        self._set(f"{call}/{self.world.process}", value)
        return [self._get(f"{call}/{process}", process, what, seconds, series) for process in range(count)]

    def barrier(self, what: str, seconds: float = PATIENCE) -> None:
        self.gather(None, what, seconds)

    def compare(self, what: str, facts: Mapping[str, str]) -> None:
        """Raise ConfigError in every process, with the same text, if a fact differs between processes."""
        wrong = list(_odd_ones(self.gather(dict(facts), what)))
        if wrong:
            raise _Difference(
                f"the processes of this run differ in {what}: {'; '.join(wrong)}. Make them equal, so that all train "
                "the same model."
            )

    # ------------------------------------------------------------------------------------------------------ requests

    def ask(self, request: str) -> None:
        """Ask the writer for something, such as to stop. May be called on any thread."""
        self._set(f"{_ASKED}/{self.world.store.add(_ASKED, 1)}", request)

    def asked(self, since: int) -> list[str]:
        """Return the requests of all processes after the first `since` ones, in the order in which they came."""
        try:
            count = self.world.store.add(_ASKED, 0)
            return [json.loads(self.world.store.get(f"{_ASKED}/{i + 1}", _POLL)) for i in range(since, count)]
        except StoreLost as lost:
            raise self._lost(lost) from None

    # --------------------------------------------------------------------------------------------------------- progress

    def at(self, section: str, limit: float | None = None, *, saving: bool = False) -> None:
        """The process comes to a section, or further in it: "step 812". The run fails if no rank comes further for
        `limit` seconds, at least `stall_seconds`; None: the limit stays as it is."""
        self._at, self.saving = section, saving
        self._limit = self._limit if limit is None else max(limit, self._stall_seconds)
        self._moves += 1

    def heartbeat(self, count: int, idle: float, ended: bool) -> Heartbeat:
        return Heartbeat(
            count=count,
            at=self._at,
            limit=self._limit,
            waits=self._waits,
            idle=idle,
            checkpoint=self.checkpoint,
            ended=ended,
            ranks=[*ranks_at(self.world, self.positions, still=idle > _STILL_SECONDS)],
        )

    def moves(self) -> object:
        return self._moves, sum([*self._calls.values()]), [position.read() for position in self.positions]

    # --------------------------------------------------------------------------------------------------------- failures

    @property
    def failure(self) -> SurogateError | None:
        """The error of the run elsewhere; None as long as there is none."""
        return None if self._watch is None else self._watch.failure

    def check(self) -> None:
        """Raise if the run has failed elsewhere. Does not wait."""
        if self.failure is not None:
            raise self.failure

    def on_failure(self, act: Callable[[], None]) -> None:
        """Call `act`, on any thread, when the run has failed elsewhere, such as to free a rank that waits."""
        if self._watch is not None:
            self._watch.on_failure.append(act)
            if self._watch.found.is_set():
                act()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Tell the other processes when the block raises, and release the store at its end.

        One process shows an error. The others write it to their logs.
        """
        try:
            yield
            self.barrier("the end of the run", inf)  # a large model may be uploaded for hours
        except BaseException as error:
            raised = self.cause(error)
            self.log(f"error: {raised}")
            if raised is error:
                raise
            raise raised from error
        finally:
            if self._watch is not None:
                self._watch.end()
            self.world.store.close()

    def on_hang(self, act: Callable[[SurogateError], None]) -> None:
        """Call `act`, on another thread, with the failure elsewhere if this process hangs, before it is ended."""
        if self._watch is not None:
            self._watch.on_hang.append(act)

    def cause(self, error: BaseException) -> BaseException:
        """Return the error to raise for one of this process: another, if it is the consequence of that.

        The first error counts: what is raised while the process ends is its consequence.
        """
        if self._watch is None:
            return error
        if self._raised is None:
            try:
                self._raised = self._found_cause(error)
            except (KeyboardInterrupt, SystemExit):  # the watch interrupts a process that does not end; this one does
                self._raised = self._found_cause(error)
        return self._raised

    def _found_cause(self, error: BaseException) -> BaseException:
        assert self._watch is not None
        self._watch.stop_interrupting()
        if isinstance(error, _Difference):
            error.told = not self.world.writer
            return error
        follows = _follows(error)
        if not self.alone and (follows or isinstance(error, (KeyboardInterrupt, SystemExit))):
            self._await_cause(_CAUSE_SECONDS if follows else _SIGNAL_SECONDS)
        if self.failure is not None:
            self.failure.told = self._watch.told
            return self.failure
        if not self.alone:
            text, lost = (
                f"process {self.world.process} of {self.world.processes}: {_text(error)}",
                isinstance(error, RunLost),
            )
            told = self._watch.post(text, _status(error), shown_by=0, lost=lost)
            if isinstance(error, SurogateError):
                error.told = told and not self.world.writer
        return error

    def _await_cause(self, seconds: float) -> None:
        """Wait until the watch has found why the run has failed. The first signal does not end it: what has started the
        processes sends one when a process is gone."""
        assert self._watch is not None
        try:
            self._watch.found.wait(seconds)
        except (KeyboardInterrupt, SystemExit):
            self._watch.found.wait(_SIGNAL_SECONDS)

    def _lost(self, lost: StoreLost) -> SurogateError:
        """Return the error for a store that is gone, which the watch notices too."""
        if self._watch is not None:
            self._await_cause(_CAUSE_SECONDS)
        return self.failure or RunLost(f"{lost}.")

    # ------------------------------------------------------------------------------------------------------ the store

    def _call(self, series: str) -> str:
        """Return the name of the next call of a series, in front of the keys that it sets."""
        number = self._calls[series] = self._calls.get(series, 0) + 1
        if number % _MEETING == 0:
            self._meet(series, number)
        return f"{series}{number}"

    def _meet(self, series: str, number: int) -> None:
        self._set(f"{series}{number}/met/{self.world.process}", None)
        for process in range(self.world.processes):
            self._get(f"{series}{number}/met/{process}", process, "the next step", PATIENCE, series)
        for past in range(number - _MEETING, number):  # all have made these calls
            self.world.store.delete(f"{series}{past}/{self.world.process}")
        self.world.store.delete(f"{series}{number - _MEETING}/met/{self.world.process}")

    def _set(self, key: str, value: Any) -> None:
        try:
            self.world.store.set(key, json.dumps(value).encode())
        except StoreLost as lost:
            raise self._lost(lost) from None

    def _get(self, key: str, process: int, what: str, seconds: float, series: str) -> Any:
        """Wait for a key that another process sets. `process` and `what` say for what, if it does not come."""
        deadline = time.monotonic() + seconds
        if not series:
            self._waits = what
        while True:
            self.check()
            try:
                value = json.loads(self.world.store.get(key, _POLL))
                if not series:
                    self._waits = ""
                return value
            except StoreLost as lost:
                raise self._lost(lost) from None
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise RunStopped(
                        f"process {process} of {self.world.processes} has not reached {what} within {seconds:g} s. The "
                        "others wait for it."
                    ) from None


def _follows(error: BaseException | None) -> bool:
    """Return whether an error may be the consequence of another process's: of a collective, or a lost store."""
    while error is not None:
        if isinstance(error, (CollectiveError, StoreLost)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _text(error: BaseException) -> str:
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "ended by a signal" if _status(error) > 128 else "ended"
    return str(error) if isinstance(error, SurogateError) else f"{type(error).__name__}: {error}"


def _status(error: BaseException) -> int:
    """Return the exit status of all processes when one ends by `error`."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else RunStopped.exit_code
    return int(getattr(error, "exit_code", RunStopped.exit_code))


def _odd_ones(found: list[dict[str, str]]) -> Iterator[str]:
    """Yield what differs, and in which processes: those that differ from most."""
    for name in dict.fromkeys(key for facts in found for key in facts):
        values = [facts.get(name, "none") for facts in found]
        common = max(dict.fromkeys(values), key=values.count)
        odd = [f"{value} in process {process}" for process, value in enumerate(values) if value != common]
        if odd:
            yield f"{name} is {', '.join(odd)}, {common} in the others"
