"""A signal whose exception a library swallows, as some do while they are imported, still ends the command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surogate_core.cli.signals import handled
from surogate_core.train.interrupt import Interrupt


def swallow(number: signal.Signals) -> None:
    with contextlib.suppress(BaseException):
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_BLOCK, [])  # returns to the interpreter, which then runs the handler


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_it_ends_a_run_before_its_first_step(number: signal.Signals, error: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with pytest.raises(error) as raised, handled():
        swallow(number)
        with Interrupt():
            pytest.fail("training began")
    assert number == signal.SIGINT or raised.value.code == 143  # type: ignore[attr-defined]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_later_error_exits_with_its_code(number: signal.Signals, code: int) -> None:
    with pytest.raises(SystemExit) as raised, handled():
        swallow(number)
        raise ImportError("half of it is missing")
    assert raised.value.code == code


def test_without_a_signal_training_begins() -> None:
    with handled(), Interrupt() as interrupt:
        assert interrupt.requested is None and interrupt.exit_code == 0


INTERRUPTED_IN_TEXT = """
import ctypes, sys
from surogate_core.cli.signals import handled
with handled():
    ctypes.pythonapi.PyRun_SimpleString(b"raise KeyboardInterrupt")
sys.exit(130)
"""


def test_an_interrupt_of_code_that_an_extension_runs_from_text_does_not_kill_the_process_at_its_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_TEXT)
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    assert done.returncode == 130


def test_an_ignored_hang_up_stays_ignored_in_a_run_and_another_asks_it_to_stop() -> None:
    import signal

    from surogate_core.train.interrupt import Interrupt

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.exit_code == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.exit_code == 129
    finally:
        signal.signal(signal.SIGHUP, before)
