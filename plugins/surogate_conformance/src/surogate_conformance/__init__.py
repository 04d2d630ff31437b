"""Tests of what a plugin provides, each definition by the checks of its kind. On the command line: `surogate plugins
test NAME_OR_PATH`. From pytest:

    assert [str(result) for result in conformance("acme-surogate-sgd") if result.state == "failed"] == []

A definition is tested in tiny runs on the CPU, and in plans for `target`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .check import Result

if TYPE_CHECKING:
    from .bench import Bench

__all__ = ["Result", "conformance"]


def conformance(name: str, target: str = "h200") -> Iterator[Result]:
    """Yield the result of every check of a distribution, plugin, folder or .py file, as soon as it is known.

    Raises ConfigError if `name` names none of them, or `target` no device.
    """
    from .cases import cases

    with bench_of(name, target) as bench:
        for case in cases(bench.subject, bench):
            yield case.run()


@contextmanager
def bench_of(name: str, target: str) -> Iterator[Bench]:
    """Find what `name` names and make a bench for it. Raises ConfigError like `conformance`."""
    from surogate_core.machine.devices import device

    from .bench import Bench
    from .subject import found

    device(target)
    with found(name) as subject, bench_folder() as folder:
        yield Bench(subject, folder, target)


@contextmanager
def bench_folder() -> Iterator[Path]:
    """Make a folder for a bench. While it exists, runs cache there, ask no hub for models, and have one thread."""
    import torch

    with tempfile.TemporaryDirectory(prefix="surogate-conformance-", ignore_cleanup_errors=True) as folder:
        before, threads = dict(os.environ), torch.get_num_threads()
        torch.set_num_threads(1)  # tiny tensors gain nothing from more, which would wait for each other
        os.environ.update(XDG_CACHE_HOME=str(Path(folder) / "cache"), HF_HUB_OFFLINE="1")
        try:
            yield Path(folder)
        finally:
            torch.set_num_threads(threads)
            os.environ.clear()
            os.environ.update(before)
