"""Regular expressions in files of others: some take years to match a name of 30 letters.

They are matched by Python's `re` in another process, which is ended when it takes too long. Texts without repetitions
and groups, which most are, are matched in this one.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
from functools import lru_cache
from reprlib import repr as brief
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import subprocess

LONGEST_SECONDS = 5.0
"""For one text. A usual expression takes microseconds."""

_PLAIN = re.compile(r"[\w.^$/-]*")
_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for line in sys.stdin:
    try:
        pattern, text, whole = json.loads(line)
        found = re.fullmatch(pattern, text) if whole else re.match(pattern, text)
        answer = None if found is None else found.groupdict()
    except (re.error, RecursionError, MemoryError, OverflowError) as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


def match_groups(pattern: str, text: str) -> dict[str, str] | None:
    """Return the named groups of `re.match(pattern, text)`; None if it does not match.

    Raises re.error for what is no regular expression, and ConfigError for one that takes longer than LONGEST_SECONDS.
    """
    if _PLAIN.fullmatch(pattern):
        found = re.match(pattern, text)
        return None if found is None else found.groupdict()
    answer = _ask(pattern, text, whole=False)
    return None if answer is None else dict(answer)


def matches_whole(pattern: str, text: str) -> bool:
    """Return whether `re.fullmatch(pattern, text)` matches. Raises as `match_groups` does."""
    if _PLAIN.fullmatch(pattern):
        return re.fullmatch(pattern, text) is not None
    return _ask(pattern, text, whole=True) is not None


def check_pattern(pattern: str) -> None:
    """Raise re.error for what is no regular expression, also for one that nests too deeply to be one."""
    try:
        re.compile(pattern)
    except (RecursionError, OverflowError) as error:
        raise re.error(f"{type(error).__name__}") from None


@lru_cache(maxsize=1 << 16)
def _ask(pattern: str, text: str, whole: bool) -> tuple[tuple[str, str], ...] | None:
    child = _child(os.getpid())
    assert child.stdin is not None and child.stdout is not None
    line = json.dumps([pattern, text, whole]) + "\n"
    try:
        child.stdin.write(line)
        child.stdin.flush()
        ready = select.select([child.stdout], [], [], LONGEST_SECONDS)[0]
        answer = child.stdout.readline() if ready else ""
    except BrokenPipeError:
        answer = ""
    if not answer:
        child.kill()
        child.communicate()
        _child.cache_clear()
        raise ConfigError(
            f"regular expression {brief(pattern)}: does not end on {brief(text)} within {LONGEST_SECONDS:.0f} s. Write "
            "it without repetitions inside of repetitions, or name the modules one by one."
        )
    found = json.loads(answer)
    if isinstance(found, str):
        raise re.error(found)
    return None if found is None else tuple(found.items())


@lru_cache(maxsize=1)
def _child(process: int) -> subprocess.Popen[str]:
    """Return the process that matches for `process`: a fork must not read the answers of its parent."""
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-ISc", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
