"""Imports the packages before any test of theirs, in processes of one thread.

A package's tests lie in a folder with the package's own name, beside `src/`: pytest would take that folder for it.
Tests run side by side, one process a core, and the bits of a sum depend on the number of threads.

Pictures of a run are not drawn in these processes: one takes a quarter of the time of a short run. Those that draw them
are the tests of the picture, `test_tiny.py`, and runs in processes of their own.

A shell lets processes in the background ignore SIGINT, nohup SIGHUP, and theirs inherit that. Tests send both.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads of a test that wants several must not spin on the cores of others
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest

import surogate.plugin  # noqa: F401  # the front end, whose words errors have, in whatever order tests run
import surogate_core  # noqa: F401
import surogate_models  # noqa: F401
import surogate_recipes_bf16  # noqa: F401
import surogate_recipes_fp8  # noqa: F401
import surogate_recipes_nvfp4  # noqa: F401
from surogate.reporting import picture

drawn = picture.drawn


@pytest.fixture(scope="session", autouse=True)
def _undrawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture, "drawn", lambda size, draw: b"\x89PNG\r\n\x1a\n")
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the pictures of the runs of a test."""
    monkeypatch.setattr(picture, "drawn", drawn)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the folders of tests for a GPU, more than half of all tests, where none of these is asked for."""
    return True if collection_path.name == "gpu" and "not gpu" in config.option.markexpr else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Let one process at a time import a module of tests, where several of them collect side by side.

    The first one writes bytecode of the module and of what it imports, and the others read it, a module behind. Else
    each process rewrites every `assert` and compiles transformers on a fresh clone, at the same time.
    """
    if not isinstance(collector, pytest.Module) or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of collections, which would visit their objects every time. Collect less
    often: a plan is a million objects that nearly all stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
