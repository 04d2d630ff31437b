"""Lists of nodes as Slurm writes them: `gpu[001-003,7],login`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from surogate_core.api import ConfigError

_NODES = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
"""A name, in which numbers may stand in brackets, and the comma after it."""


def expand(nodelist: str) -> list[str]:
    """Return the names in a list, in its order. Raises ConfigError if it is not one."""
    text, at, names = nodelist.strip(), 0, list[str]()
    while at < len(text):
        found = _NODES.match(text, at)
        if found is None:
            break
        parts = re.split(r"\[([^\]]*)\]", found[1])
        choices = [list(_numbers(part, nodelist)) if index % 2 else [part] for index, part in enumerate(parts)]
        names += ["".join(choice) for choice in product(*choices)]
        at = found.end()
    if at < len(text) or not names:
        raise _unreadable(nodelist)
    return names


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    """Yield the numbers of "001-003,7" with their leading zeros."""
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise _unreadable(nodelist)
        first, last = found[1], found[2] or found[1]
        for value in range(int(first), int(last) + 1):
            yield str(value).zfill(len(first))


def _unreadable(nodelist: str) -> ConfigError:
    return ConfigError(
        f"{nodelist!r} is not a list of nodes such as gpu[01-04,7]. Set MASTER_ADDR to the machine of rank 0."
    )
