"""Prints the folder with the headers of a package from the index, downloading its wheel if that was not done before.

    python fetch_headers.py nvidia-cublas==13.10.0.20

The wheel is not installed: its libraries are not needed to compile, and its headers must not depend on what else is in
the environment. Downloads by pip, so its configuration (mirrors, proxies, caches) holds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surogate" / "headers"


def download(package: str, into: Path) -> Path:
    """The wheel of `package` alone. pip's own output goes to stderr."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(into),
        package,
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = into.glob("*.whl")
    return wheel


def extract(wheel: Path, into: Path) -> None:
    """Everything below a folder `include` of the wheel, wherever that lies."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            parts = PurePosixPath(member.filename).parts
            if member.is_dir() or "include" not in parts[:-1] or ".." in parts:
                continue
            target = into.joinpath(*parts[parts.index("include") + 1 :])
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)


def folder(package: str) -> Path:
    """The folder appears whole or not at all: builds may run side by side.

    It is named `include`, as in the wheel: a header of the cuDNN frontend asks for "../include/...".
    """
    final = cache() / package.replace("==", "-") / "include"
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
            headers = Path(scratch, "include")
            extract(download(package, Path(scratch)), headers)
            try:
                headers.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
    return final


if __name__ == "__main__":
    try:
        print(folder(sys.argv[1]))
    except subprocess.CalledProcessError:
        raise SystemExit(f"{sys.argv[1]}: pip could not download it") from None
