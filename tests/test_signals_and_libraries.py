"""A signal ends the command, whatever libraries do; if it comes while one is imported, after the import."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surogate.cli.app import main
from surogate.cli.signals import handled
from surogate.training.interrupt import Interrupt
from surogate_core.errors import ConfigError

LIBRARY = """
import os, signal, time
for _ in range(2):  # a supervisor may send it to the process and to its group
    os.kill(os.getpid(), signal.{name})
time.sleep(0.1)
complete = True
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Write a module that sends a signal while it is imported. Return its name."""
    number: signal.Signals = request.param
    name = f"library_of_{number.name.lower()}"
    (tmp_path / f"{name}.py").write_text(LIBRARY.format(name=number.name))
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("library", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], indirect=["library"]
)
def test_it_ends_the_command_after_the_import(library: str, code: int) -> None:
    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised, handled():
        __import__(library)
        time.sleep(50)
    assert raised.value.args == ((code,) if code != 130 else ())
    assert sys.modules.pop(library).complete


def test_training_that_has_begun_meanwhile_is_asked_to_stop_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "library_that_trains.py").write_text(
        LIBRARY.format(name="SIGTERM")
        + "from surogate.training.interrupt import Interrupt\ninterrupt = Interrupt().__enter__()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with handled():
        interrupt = __import__("library_that_trains").interrupt
        with interrupt:
            while interrupt.requested is None:
                time.sleep(0.01)
            time.sleep(0.1)
        assert interrupt.exit_code == 143
    assert capfd.readouterr().err.count("saving after this step") == 1


@pytest.mark.parametrize("module", ["typer", "gc", "pathlib"])
def test_ctrl_c_while_the_program_is_imported_ends_it_without_a_traceback(module: str, tmp_path: Path) -> None:
    """The modules stand for the first half second of a command."""
    program = (
        "import os, signal, sys, time\n"
        "class Stopped:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(5)\n"
        f"sys.modules.pop({module!r}, None)\n"
        "sys.meta_path.insert(0, Stopped())\n"
        "sys.argv = ['surogate', '--version']\n"
        "import runpy\n"
        "runpy.run_module('surogate', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, "", "interrupted")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_a_command_is_found_ends_it_too(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surogate.cli.app.app", lambda prog_name: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_exits_with_its_code_whatever_a_library_raises_in_its_place(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pydantic does, which builds its validators in Rust."""

    def built(*given: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException as error:
            raise ConfigError(f"a validator was not built: {error!r}") from None

    monkeypatch.setattr("surogate.cli.doctor.doctor_command", built)
    monkeypatch.setattr(sys, "argv", ["surogate", "doctor"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == code and capsys.readouterr().err == ""


def test_a_signal_whose_exception_is_discarded_is_sent_again() -> None:
    class Discards:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as raised, handled():
        Discards()
        time.sleep(50)
    assert raised.value.code == 143


def test_training_does_not_begin_after_a_signal_that_a_library_swallowed() -> None:
    with pytest.raises(SystemExit) as raised, handled():
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGHUP)
        with Interrupt():
            pytest.fail("training began")
    assert raised.value.code == 129


def test_a_command_that_a_module_runs_while_it_is_imported_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(
        "import signal, time\nfrom surogate.cli.signals import handled\n"
        "with handled():\n    signal.raise_signal(signal.SIGTERM)\n    time.sleep(60)\n"
    )
    assert subprocess.run([sys.executable, "-c", "import launcher"], cwd=tmp_path, timeout=50).returncode == 143


def test_without_a_signal_training_begins() -> None:
    with handled(), Interrupt() as interrupt:
        assert interrupt.requested is None and interrupt.exit_code == 0


def test_an_ignored_hang_up_stays_ignored_in_a_run_and_another_asks_it_to_stop() -> None:
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
