"""`manifest.json`: the contents of a checkpoint and its run, with size and hash of every file.

    {"format", "step", "position", "facts", "config", "versions", "files": {name: {"bytes", "xxh3_128"}}, "xxh3_128"}

It is the last file that is written, and ends with a hash of itself (`api.sealed`). The hash is XXH3: 20 GB/s on one
core against 0.8 GB/s of BLAKE2. It detects damage by a disk, not tampering.

Format 1, of 0.1.0 and 0.2.0, has no hash of itself, and `facts` by the sentences of that time. It is read as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128

from surogate_core.api.destination import MANIFEST
from surogate_core.api.regular_file import refuse_special
from surogate_core.api.sealed import BrokenSeal, sealed, unsealed
from surogate_core.errors import ConfigError

from .facts import DATA, DATASETS, facts_of_format_1
from .folders import step_of

FORMAT = 2


class DamagedCheckpoint(Exception):
    """A checkpoint that differs from its manifest, or has none. The message names the file and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json.

    step      optimizer steps done
    position  the rest of the loop's progress
    facts     what a resumed run must have in common with this one, by id; see `saved_run.facts`
    config    the resolved config; a resumed run should have the same, and so the versions
    versions  of the packages and the device
    files     path below the directory -> {"bytes", "xxh3_128"}
    """

    step: int
    position: Mapping[str, Any]
    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]
    format: int = FORMAT


class HashedFile:
    """Writes to an open file and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def list_files(
    directory: Path, hashed: Mapping[str, str], others: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return `Manifest.files` of a directory. `hashed`: known hashes of files; the other files are read.

    `others`: files that other processes have written, which a shared folder may not show yet.
    """
    files = dict(others or {})
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if name not in files:
            files[name] = {"bytes": path.stat().st_size, "xxh3_128": hashed.get(name) or hash_file(path)}
    return files


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest. Not synced to the disk: `save_checkpoint` does that for the directory."""
    (directory / MANIFEST).write_text(json.dumps(sealed(asdict(manifest)), indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest. Raises DamagedCheckpoint if it is missing, invalid, of another step than the folder or of an
    unknown format, or if its hash is missing or another one."""
    path = directory / MANIFEST
    try:
        refuse_special(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        format = content.get("format")
        if format not in (1, FORMAT):
            raise DamagedCheckpoint(f"{path}: format {format!r}, this version reads 1 to {FORMAT}")
        manifest = Manifest(**(unsealed(content) if format == FORMAT else content))
        _check(manifest)
        if format == 1:
            manifest = replace(manifest, facts=facts_of_format_1(manifest.facts))
    except BrokenSeal as broken:
        raise DamagedCheckpoint(f"{path}: {broken}") from None
    except ConfigError as error:
        raise DamagedCheckpoint(str(error)) from None
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: is not a manifest ({error})") from None
    for folder in (directory, directory.resolve()):
        if step_of(folder) not in (None, manifest.step):
            raise DamagedCheckpoint(f"{path}: is of step {manifest.step}, its folder is {folder.name}")
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError unless every field has the type that `Manifest` declares."""
    for field in ("position", "facts", "config", "versions", "files"):
        if not isinstance(getattr(manifest, field), dict):
            raise ValueError(f"{field} is not an object")
    caches = manifest.facts.get(DATASETS, [])
    if not isinstance(caches, list) or not all(
        isinstance(entry, dict) for entry in (*caches, manifest.facts.get(DATA, {}))
    ):
        raise ValueError(f"facts: {DATASETS} or {DATA} does not consist of objects")
    if isinstance(manifest.step, bool) or not isinstance(manifest.step, int) or manifest.step < 0:
        raise ValueError(f"step is {manifest.step!r}")
    for name, entry in manifest.files.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
            raise ValueError(f"files: {name!r} has no size")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"files: {name!r} is not in the checkpoint")


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Read every file once. Raises DamagedCheckpoint naming the first with another size or hash."""
    paths = {directory / name: expected for name, expected in manifest.files.items()}
    for path, expected in paths.items():  # sizes first, which is quick
        try:
            found = os.stat(path).st_size if path.is_file() else -1
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: {error.strerror or error}") from None
        if found != expected["bytes"]:
            size = "missing" if found < 0 else f"{found:,} bytes"
            raise DamagedCheckpoint(f"{path}: {size}, {expected['bytes']:,} bytes were written")
    for path, expected in paths.items():
        try:
            found_hash = hash_file(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from None
        if found_hash != expected.get("xxh3_128"):
            raise DamagedCheckpoint(f"{path}: its content differs from what was written (hash mismatch)")
