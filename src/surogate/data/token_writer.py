"""Writes token caches (`cache`): shard by shard, hashed as it is written, and visible only when it is complete.

While it is written, the directory also holds lengths.bin, and shards.jsonl with a line for each finished shard: the
counts so far, for each file a hash of all of it so far, and a hash of the line. Whoever continues after an interrupted
process hashes what is there, which the rest needs anyway, and keeps the shards that are as they were written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from surogate_core.api import Omission
from surogate_core.api.proven_file import PieceHashes
from surogate_core.api.sealed import sealed, unsealed
from surogate_core.errors import RunStopped

from .cache import (
    CACHE_FORMAT,
    HASHES,
    MANIFEST,
    MASK,
    OFFSETS,
    PIECES,
    PLACES,
    TOKENS,
    Bools,
    Int64s,
    Manifest,
    column_file,
)

_LENGTHS = "lengths.bin"
_JOURNAL = "shards.jsonl"


@dataclass
class Counts:
    """Progress of a writer: `rows` of the source, and as in `Manifest`.

    bits: mask bits of the last, incomplete byte, as "0" and "1".
    """

    rows: int = 0
    n_docs: int = 0
    n_tokens: int = 0
    n_trained: int = 0
    n_bytes: int = 0
    empty_rows: int = 0
    max_token: int = -1
    omissions: list[list[Any]] = field(default_factory=list)
    bits: str = ""


class TokenWriter:
    """Writes a cache directory: documents are appended in order, and `publish` makes them visible atomically.

    A context manager; the caller must hold the lock of the directory. `finish_shard` makes what was appended durable.
    If the process is killed or interrupted, the next writer of the same directory starts with the `counts` of the last
    of `shards` shards, and produces the same bytes. Leaving the context by another error, or without `publish`, removes
    the partial directory.
    """

    def __init__(
        self, directory: Path, dtype: np.dtype[Any], columns: Mapping[str, str] | None = None, group: int = 1
    ) -> None:
        """`columns` and `group`: see `Manifest`."""
        self._columns, self._group = columns or {}, group
        self._final = directory
        self._partial = directory.with_name(f"{directory.name}.partial")
        self._dtype = dtype
        self.counts = Counts()
        self.shards = 0

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:  # an interrupt too
            if not self.shards:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise
        return self

    def _open(self) -> None:
        self._partial.mkdir(exist_ok=True)
        found, hashes = _proven(self._partial, list(_finished_shards(self._partial, self._sizes)), self._sizes)
        self.counts, self.shards = found[-1].counts if found else Counts(), len(found)
        sizes = self._sizes(self.counts)
        self._files = {name: _HashedFile(_open_at(self._partial / name, sizes[name]), hashes[name]) for name in sizes}
        self._tokens, self._mask, self._lengths, self._hashes, self._places, *_ = self._files.values()
        self._journal = (self._partial / _JOURNAL).open("w", encoding="utf-8")
        self._part, self._part_tokens = _document_hash(), 0
        self._journal.writelines(shard.line() for shard in found)
        _sync(self._journal)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._journal.close()
            for file in self._files.values():
                file.file.close()
        finally:  # closing flushes, which fails if the disk is full
            if error is None or isinstance(error, Exception) or not self.shards:
                shutil.rmtree(self._partial, ignore_errors=True)

    def _sizes(self, counts: Counts) -> dict[str, int]:
        """Return the size in bytes of each file after `counts`."""
        of_column = {"token": 4 * counts.n_tokens, "document": 4 * counts.n_docs}
        return {
            TOKENS: counts.n_tokens * self._dtype.itemsize,
            MASK: counts.n_tokens // 8,
            _LENGTHS: counts.n_docs * 8,
            HASHES: counts.n_docs * 8,
            PLACES: counts.n_docs * 16,
            **{column_file(name): of_column[per] for name, per in self._columns.items()},
        }

    def finish_shard(self) -> None:
        """Sync what was appended to disk, and record its extent in the journal."""
        for file in self._files.values():
            _sync(file.file)
        hashes = {name: file.hashes.digest() for name, file in self._files.items()}
        self._journal.write(_Shard(self.counts, hashes).line())
        _sync(self._journal)
        self.shards += 1

    def append(
        self,
        tokens: npt.NDArray[Any],
        trained: Bools,
        lengths: Int64s,
        places: Int64s,
        columns: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> None:
        """Append documents: their concatenated tokens, mask and columns, and the length and place of each."""
        if len(tokens) == 0:
            return
        tokens = self._write(tokens, trained)
        stops = np.cumsum(lengths)
        documents = (tokens[start:stop].tobytes() for start, stop in zip(stops - lengths, stops, strict=True))
        self._end(b"".join(_document_hash(document).digest() for document in documents), lengths, places)
        for name in self._columns:
            self._files[column_file(name)].write((columns or {})[name].astype("<f4").tobytes())

    def append_part(self, tokens: npt.NDArray[Any], trained: Bools) -> None:
        """Append tokens of a document without columns, which `end_document` ends. No shard can be finished before."""
        if len(tokens):
            self._part.update(self._write(tokens, trained).tobytes())
            self._part_tokens += len(tokens)

    def end_document(self, place: Int64s) -> bool:
        """End the document of the parts, of the row at `place`. Return whether it has tokens: else there is none."""
        length = self._part_tokens
        if length:
            self._end(self._part.digest(), np.array([length]), place)
        self._part, self._part_tokens = _document_hash(), 0
        return length > 0

    def _write(self, tokens: npt.NDArray[Any], trained: Bools) -> npt.NDArray[Any]:
        """Write tokens and mask. Return the tokens as they are written."""
        tokens = tokens.astype(self._dtype)
        self._tokens.write(tokens.tobytes())
        bits = np.concatenate([_bools(self.counts.bits), trained])
        whole = len(bits) - len(bits) % 8
        self._mask.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self.counts.bits = "".join("01"[int(bit)] for bit in bits[whole:])
        self.counts.n_tokens += len(tokens)
        self.counts.n_trained += int(np.count_nonzero(trained))
        self.counts.max_token = max(self.counts.max_token, int(tokens.max()))
        return tokens

    def _end(self, hashes: bytes, lengths: Int64s, places: Int64s) -> None:
        self._hashes.write(hashes)
        self._lengths.write(lengths.astype("<i8").tobytes())
        self._places.write(places.astype("<i8").tobytes())
        self.counts.n_docs += len(lengths)

    def omit(self, omission: Omission, where: str) -> None:
        """Add an omission of the row at `where` to the sums."""
        kind = [omission.what, omission.unit, omission.why]
        found = next((sums for sums in self.counts.omissions if sums[:3] == kind), None)
        if found is None:
            found = [*kind, 0, 0, ""]
            self.counts.omissions.append(found)
        found[3] += omission.count
        found[4] += omission.of
        if omission.count and not found[5]:
            found[5] = where.rsplit("/", 1)[-1]

    def publish(self, settings: Mapping[str, Any]) -> None:
        """Write offsets and manifest, sync everything to disk and rename the directory to its final name."""
        self._mask.write(np.packbits(_bools(self.counts.bits), bitorder="little").tobytes())
        files = {name: file for name, file in self._files.items() if name != _LENGTHS}
        with (self._partial / OFFSETS).open("wb") as offsets:
            files[OFFSETS] = _HashedFile(offsets, PieceHashes())
            ends = np.cumsum(self._document_lengths())
            np.lib.format.write_array(files[OFFSETS], np.concatenate([np.zeros(1, np.int64), ends]))
            _sync(offsets)
        with (self._partial / PIECES).open("wb") as pieces:
            for file in files.values():
                pieces.write(file.hashes.array().tobytes())
            _sync(pieces)
        for sums in self.counts.omissions:
            if not sums[0]:  # whole rows are left out
                sums[4] = self.counts.rows
        shared = Manifest.__annotations__.keys() & Counts.__annotations__
        manifest = Manifest(
            format=CACHE_FORMAT,
            dtype=self._dtype.str,
            settings=settings,
            columns=self._columns,
            group=self._group,
            files={name: {"bytes": file.hashes.bytes, "pieces": file.hashes.digest()} for name, file in files.items()},
            **{name: getattr(self.counts, name) for name in shared},
        )
        with (self._partial / MANIFEST).open("w", encoding="utf-8") as text:
            json.dump(sealed(asdict(manifest)), text, indent=1)
            _sync(text)
        for written in self._files.values():
            _sync(written.file)
        for name in (_LENGTHS, _JOURNAL):
            (self._partial / name).unlink()
        if self._final.exists():  # damaged: the caller has checked that under the lock
            shutil.rmtree(self._final)
        self._partial.rename(self._final)
        parent = os.open(self._final.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def _document_lengths(self) -> Int64s:
        """Return what was written to lengths.bin. Raises RunStopped if it is not there any more."""
        self._lengths.file.flush()
        lengths = np.fromfile(self._partial / _LENGTHS, "<i8")
        read = PieceHashes()
        read.update(lengths.tobytes())
        if read.digest() != self._lengths.hashes.digest():
            raise RunStopped(
                f"{self._partial / _LENGTHS}: its content differs from what was written (hash mismatch): the disk is "
                "failing. Set XDG_CACHE_HOME to another disk."
            )
        return lengths


@dataclass(frozen=True)
class _HashedFile:
    """An open file, and the hashes of all that is in it."""

    file: BinaryIO
    hashes: PieceHashes

    def write(self, data: bytes) -> None:
        self.hashes.update(data)
        self.file.write(data)


@dataclass(frozen=True)
class _Shard:
    """The counts at the end of a shard, and the hash of each file up to there."""

    counts: Counts
    files: Mapping[str, str]

    def line(self) -> str:
        return json.dumps(sealed({**asdict(self.counts), "files": self.files})) + "\n"


def _finished_shards(directory: Path, sizes: Callable[[Counts], Mapping[str, int]]) -> Iterator[_Shard]:
    """Yield the shards whose data is in the files by their sizes; nothing for a damaged directory."""
    try:
        lines = (directory / _JOURNAL).read_text(encoding="utf-8").splitlines()
        present = {name: (directory / name).stat().st_size for name in sizes(Counts())}
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            content = unsealed(json.loads(line))
            shard = _Shard(files=content.pop("files"), counts=Counts(**content))
        except (ValueError, TypeError, KeyError):  # the last line, if the process was killed while writing it
            return
        if any(present[name] < size for name, size in sizes(shard.counts).items()):
            return
        yield shard


def _proven(
    directory: Path, shards: Sequence[_Shard], sizes: Callable[[Counts], Mapping[str, int]]
) -> tuple[Sequence[_Shard], dict[str, PieceHashes]]:
    """Return the first shards that are in the files as they were written, and the hashes of the files up to there."""
    before = sizes(Counts())
    hashes = {name: PieceHashes() for name in before}
    if not shards:
        return shards, hashes
    with ExitStack() as stack:
        files = {name: stack.enter_context((directory / name).open("rb")) for name in before}
        for number, shard in enumerate(shards):
            now = sizes(shard.counts)
            for name, size in now.items():
                if hashes[name].read(files[name], size - before[name]).digest() != shard.files.get(name):
                    return _proven(directory, shards[:number], sizes)
            before = now
    return shards, hashes


def _document_hash(tokens: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(tokens, digest_size=8)


def _bools(bits: str) -> Bools:
    return np.array([bit == "1" for bit in bits], np.bool_)


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open a file for appending after its first `size` bytes, dropping the rest; create it if it does not exist."""
    file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
