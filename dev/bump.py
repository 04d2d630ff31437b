"""Writes a version into every file that names it: python dev/bump.py 0.2.0

These are the versions of the packages, the ranges in which they require each other, in documentation and templates too,
and what tests and pages show of them. The changelog, the log and what earlier versions saved stay as they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = (
    "CHANGELOG.md",
    "dev",
    "tests/upgrade",
    "tests/packaging/test_bump.py",
    "docs/reference/released.txt",
    "examples/data",
)


def bumped(text: str, old: str, new: str) -> str:
    """Return a file's text with the version `new` of this repository's packages where it has `old`."""
    version = re.escape(old)
    ranges = tuple(f">={major}.{minor},<{major}.{minor + 1}" for major, minor in map(_minor, (old, new)))
    text = text.replace(*ranges)
    text = re.sub(rf'^(name = "surogate[\w-]*"\nversion|__version__) = "{version}"', rf'\1 = "{new}"', text, flags=re.M)
    return re.sub(rf"(?<![\w-])(surogate[\w-]*[ -]){version}\b", rf"\g<1>{new}", text)


def _minor(version: str) -> tuple[int, int]:
    major, minor, _ = map(int, version.split("."))
    return major, minor


def main(new: str) -> None:
    source = (ROOT / "surogate_core/src/surogate_core/version.py").read_text()
    (old,) = re.findall(r'^__version__ = "(.+)"', source, re.M)
    excluded = [f":!{path}" for path in KEPT]
    found = subprocess.run(["git", "grep", "-lIF", old.rpartition(".")[0], "--", ".", *excluded],
                           cwd=ROOT, capture_output=True, text=True, check=True)  # fmt: skip
    for name in found.stdout.splitlines():
        before = (ROOT / name).read_text()
        if (after := bumped(before, old, new)) != before:
            (ROOT / name).write_text(after)
            print(name)


if __name__ == "__main__":
    main(sys.argv[1])
