"""Imports the packages before any test of theirs, in processes of one thread.

A package's tests lie in a folder with the package's own name, beside `src/`: pytest would take that folder for it.
Tests run side by side, one process a core, and the bits of a sum depend on the number of threads.

A shell lets processes in the background ignore SIGINT, nohup SIGHUP, and theirs inherit that. Tests send both.
"""

from __future__ import annotations

import gc
import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import surogate_core  # noqa: F401
import surogate_models  # noqa: F401
import surogate_recipes_bf16  # noqa: F401
import surogate_recipes_fp8  # noqa: F401
import surogate_recipes_nvfp4  # noqa: F401


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of collections, which would visit their objects every time. Collect less
    often: a plan is a million objects that nearly all stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
