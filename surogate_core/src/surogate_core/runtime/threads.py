"""The thread of a rank: runs jobs in order and keeps the first error.

A rank may be blocked forever inside the driver, waiting for a peer that has failed. Its thread must not prevent the
process from ending: it is a daemon thread, waits for it have a timeout, and `leave_if_stuck` does not wait for it.
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
    """The error of a job, and its time by `time.monotonic`."""

    time: float
    error: BaseException


class _Job(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]


class RankThread(threading.Thread):
    """Runs jobs one after another. After an error or `close`, queued jobs are cancelled."""

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
        return self._busy

    def submit(self, function: Callable[..., Result], *arguments: Any, **named: Any) -> Future[Result]:
        """Queue a call of `function`. The future gets its result or its exception."""
        future: Future[Result] = Future()
        self._jobs.put(_Job(future, lambda: function(*arguments, **named)))
        return future

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Finish the current job, run `last` (even after an error; exceptions in it are discarded), then stop."""
        self._last, self._closed = last, True
        self._jobs.put(None)

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._busy = True
            self._do(job)
            self._busy = False
            del job  # it refers to the worker, whose memory is freed with its last reference
        if self._last is not None:
            self._busy = True
            with suppress(Exception):
                self._last()
            self._busy, self._last = False, None

    def _do(self, job: _Job) -> None:
        if self.failure is not None or self._closed:
            job.future.cancel()
            job.future.set_running_or_notify_cancel()  # wakes threads that wait for the future
            return
        try:
            result = job.work()
        except BaseException as error:  # any exception: another thread reports it
            self.failure = Failure(time.monotonic(), error)
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


def join(threads: list[RankThread], seconds: float) -> None:
    """Wait for closed threads, at most `seconds` in total."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def leave_if_stuck(error: BaseException) -> None:
    """End the process immediately, with the exit code of `error`, if a thread is still running a job.

    A normal exit of the interpreter would run destructors of the libraries that the thread is inside of, and these may
    wait for it. Call this where `error` is about to leave the program.
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
