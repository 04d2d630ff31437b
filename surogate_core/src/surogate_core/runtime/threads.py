"""A thread for each rank: it runs what it is given, in order, and keeps the first error for others to notice.

A rank may wait for ever inside a driver, for a peer that is gone. Its thread therefore never holds up the end of the
process: it is a daemon, waits for it are bounded, and `leave_if_stuck` ends the process past it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class Failure(NamedTuple):
    """The error that ended a thread's work, and when it came, by `time.monotonic`."""

    time: float
    error: BaseException


class _Job(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]


class RankThread(threading.Thread):
    """Runs jobs one after another, until an error or `close`: jobs that still wait then are cancelled."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.failure: Failure | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._busy = False
        self._last: Callable[[], object] | None = None
        self._closed = False
        self.start()

    @property
    def busy(self) -> bool:
        """Whether it is in the middle of a job."""
        return self._busy

    def submit(self, function: Callable[..., Result], *arguments: Any, **named: Any) -> Future[Result]:
        """Let the thread call `function`; the future has its result or its error."""
        future: Future[Result] = Future()
        self._jobs.put(_Job(future, lambda: function(*arguments, **named)))
        return future

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End after the job under way and then `last`, which runs after an error too and whose own nobody hears."""
        self._last, self._closed = last, True
        self._jobs.put(None)

    def run(self) -> None:
        """The thread's life."""
        while (job := self._jobs.get()) is not None:
            self._busy = True
            self._do(job)
            self._busy = False
            del job  # it holds the worker, whose memory goes with its last reference
        if self._last is not None:
            self._busy = True
            with suppress(Exception):
                self._last()
            self._busy, self._last = False, None

    def _do(self, job: _Job) -> None:
        if self.failure is not None or self._closed:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()  # which tells those who wait
            return
        try:
            result = job.work()
        except BaseException as error:  # whatever it is, another thread reports it
            self.failure = Failure(time.monotonic(), error)
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


def join(threads: list[RankThread], seconds: float) -> None:
    """Wait for closed threads, `seconds` at most for all of them."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def leave_if_stuck(error: BaseException) -> None:
    """End the process here, with the exit code of `error`, if a thread is still inside a job.

    The interpreter's own end would run destructors of libraries that the thread is in the middle of, and these may
    wait for it. To be called where `error` is about to leave the program.
    """
    if not any(isinstance(thread, RankThread) and thread.busy for thread in threading.enumerate()):
        return
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
