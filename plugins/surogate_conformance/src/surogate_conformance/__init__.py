"""Tests of what a plugin provides, each definition by the checks of its kind. On the command line: `surogate plugins
test NAME_OR_PATH`. From pytest:

    from surogate_conformance import conformance

    @pytest.mark.parametrize("result", conformance("acme-surogate-sgd"), ids=str)
    def test_conforms(result): ...

A definition is tested in tiny runs on the CPU, and in plans for `target`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .check import Result

__all__ = ["Result", "conformance"]


def conformance(name: str, target: str = "h200") -> Iterator[Result]:
    """Yield the result of every check of a distribution, plugin, folder or .py file, as soon as it is known.

    Raises ConfigError if `name` names none of them, or `target` no device.
    """
    from surogate_core.machine.devices import device

    from .subject import find_subject

    device(target)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    subject = find_subject(name)
    from .bench import Bench
    from .cases import cases

    with tempfile.TemporaryDirectory(prefix="surogate-conformance-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        try:
            for case in cases(subject, Bench(subject, Path(folder), target)):
                yield case.run()
        finally:
            os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)
