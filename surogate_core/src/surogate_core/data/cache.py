"""Tokenised datasets on disk, written once and then memory-mapped.

A dataset is a directory `<cache root>/<hash>/`:

    tokens.bin      uint16 (vocabularies of at most 65,536) or uint32, little-endian, the documents concatenated
    mask.bin        one bit per token, least significant bit first: bit i is set if token i is trained, i.e. a label
                    where it is the target
    offsets.npy     int64 [n_docs + 1]: document d is tokens offsets[d] to offsets[d + 1]
    hashes.bin      uint64 [n_docs]: a hash of the tokens of each document
    places.bin      int64 [n_docs, 2]: file and number of the row of each document, for `Source.place`
    column.NAME.bin float32 [n_tokens] or [n_docs]: a column of the dataset type
    manifest.json   counts, settings and hashes

It is written to `<hash>.partial`, synced and renamed. A directory named `<hash>` was therefore complete when it got
its name. While it is being written, it also contains lengths.bin, and shards.jsonl with a line for each finished
shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

import filelock
import numpy as np
import numpy.typing as npt

from ..api import Omission
from ..machine.cache_home import cache_home

CACHE_FORMAT = 3
"""Part of the key of a cache, which checkpoints compare: a cache without a newer file is made anew by its size."""

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


def default_cache_root() -> Path:
    """Return `$XDG_CACHE_HOME/surogate/tokens`, by default in `~/.cache`."""
    return cache_home() / "tokens"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 if it holds every token of the vocabulary, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Counts and settings of a dataset.

    n_bytes: UTF-8 bytes of text. n_trained: set bits of the mask. empty_rows: rows without a token, left out.
    columns: name -> "token" or "document". group: documents of a row, which stay together.
    omissions: parts of the rows that are not in the tokens, each `[what, unit, why, count, of, first row]`.
    settings: everything that decides the tokens; the directory is named after their hash.
    """

    format: int
    dtype: str
    n_docs: int
    n_tokens: int
    n_trained: int
    n_bytes: int
    max_token: int
    empty_rows: int
    omissions: list[list[Any]]
    settings: Mapping[str, Any]
    columns: Mapping[str, str] = field(default_factory=dict)
    group: int = 1


class DamagedCache(Exception):
    """A cache directory does not match its manifest. The message names the file and the mismatch."""


@dataclass(frozen=True)
class TokenDataset:
    """The documents of a dataset as token ids. The arrays are memory maps if the dataset was opened from disk.

    tokens: uint16 or uint32 [n_tokens]. mask: uint8 [ceil(n_tokens / 8)]. offsets: int64 [n_docs + 1].
    omissions: each with the first row that has it ("rows.jsonl:7"). hashes: uint64 [n_docs], of the tokens of each
    document. places: int64 [n_docs, 2], for `Source.place`, which `where` calls. columns: by name, [n_tokens] or
    [n_docs], or [n_tokens, ...] of those that the loss makes; facts: see `Prepared`. Others: as in `Manifest`.
    """

    tokens: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    offsets: Int64s
    n_bytes: int
    max_token: int
    n_trained: int
    path: Path | None = None
    omissions: Sequence[tuple[Omission, str]] = ()
    empty_rows: int = 0
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    facts: Mapping[str, str | None] = field(default_factory=dict)
    group: int = 1
    places: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    where: Callable[[int], str] = lambda document: f"document {document + 1:,}"

    @property
    def n_docs(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def trained(self, start: int, stop: int) -> Bools:
        """Return whether each of tokens `start` to `stop` is trained."""
        return self.trained_at(np.arange(start, stop))

    def trained_at(self, index: Int64s) -> Bools:
        bits: Bools = (self.mask[index >> 3] >> (index & 7).astype(np.uint8)) & 1 == 1
        return bits


def open_cache(directory: Path) -> TokenDataset:
    """Map a cache directory into memory. Raises DamagedCache if file sizes or counts differ from the manifest."""
    try:
        manifest = Manifest(**json.loads((directory / "manifest.json").read_text(encoding="utf-8")))
        offsets = np.load(directory / "offsets.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise DamagedCache(f"{directory}: {error}") from error
    if manifest.format != CACHE_FORMAT or manifest.dtype not in ("<u2", "<u4"):
        raise DamagedCache(f"{directory}: format {manifest.format} with dtype {manifest.dtype}")
    dtype = np.dtype(manifest.dtype)
    expected = {"tokens.bin": manifest.n_tokens * dtype.itemsize, "mask.bin": (manifest.n_tokens + 7) // 8}
    expected |= {_HASHES: manifest.n_docs * 8, "places.bin": manifest.n_docs * 16}
    counts = {"token": manifest.n_tokens, "document": manifest.n_docs}
    expected |= {column_file(name): 4 * counts[per] for name, per in manifest.columns.items()}
    for name, size in expected.items():
        found = (directory / name).stat().st_size if (directory / name).is_file() else -1
        if found != size:
            raise DamagedCache(f"{directory / name}: {'missing' if found < 0 else f'{found} bytes'}, expected {size}")
    ascending = len(offsets) == manifest.n_docs + 1 and bool(np.all(offsets[1:] > offsets[:-1]))
    if not ascending or offsets[0] != 0 or offsets[-1] != manifest.n_tokens:
        raise DamagedCache(f"{directory / 'offsets.npy'}: not the offsets of {manifest.n_docs} documents")
    return TokenDataset(
        tokens=np.memmap(directory / "tokens.bin", dtype, "r"),
        mask=np.memmap(directory / "mask.bin", np.uint8, "r"),
        offsets=offsets,
        n_bytes=manifest.n_bytes,
        max_token=manifest.max_token,
        n_trained=manifest.n_trained,
        path=directory,
        omissions=[(Omission(*fields), first) for *fields, first in manifest.omissions],
        empty_rows=manifest.empty_rows,
        hashes=np.memmap(directory / _HASHES, "<u8", "r"),
        places=np.memmap(directory / "places.bin", "<i8", "r").reshape(-1, 2),
        columns={name: np.memmap(directory / column_file(name), "<f4", "r") for name in manifest.columns},
        group=manifest.group,
    )


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
        found = list(_finished_shards(self._partial, self._sizes))
        self.counts, self.shards = found[-1] if found else Counts(), len(found)
        self._files = {name: _open_at(self._partial / name, size) for name, size in self._sizes(self.counts).items()}
        self._tokens, self._mask, self._lengths, self._hashes, self._places, *_ = self._files.values()
        self._journal = (self._partial / _JOURNAL).open("a" if found else "w", encoding="utf-8")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._journal.close()
            for file in self._files.values():
                file.close()
        finally:  # closing flushes, which fails if the disk is full
            if error is None or isinstance(error, Exception) or not self.shards:
                shutil.rmtree(self._partial, ignore_errors=True)

    def _sizes(self, counts: Counts) -> dict[str, int]:
        """Return the size in bytes of each file after `counts`."""
        of_column = {"token": 4 * counts.n_tokens, "document": 4 * counts.n_docs}
        return {
            "tokens.bin": counts.n_tokens * self._dtype.itemsize,
            "mask.bin": counts.n_tokens // 8,
            _LENGTHS: counts.n_docs * 8,
            _HASHES: counts.n_docs * 8,
            "places.bin": counts.n_docs * 16,
            **{column_file(name): of_column[per] for name, per in self._columns.items()},
        }

    def finish_shard(self) -> None:
        """Sync what was appended to disk, and record its extent in the journal."""
        for file in self._files.values():
            _sync(file)
        self._journal.write(json.dumps(dataclasses.asdict(self.counts)) + "\n")
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
        tokens = tokens.astype(self._dtype)
        self._tokens.write(tokens.tobytes())
        stops = np.cumsum(lengths)
        for start, stop in zip(stops - lengths, stops, strict=True):
            self._hashes.write(hashlib.blake2b(tokens[start:stop].tobytes(), digest_size=8).digest())
        bits = np.concatenate([_bools(self.counts.bits), trained])
        whole = len(bits) - len(bits) % 8
        self._mask.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self.counts.bits = "".join("01"[int(bit)] for bit in bits[whole:])
        self._lengths.write(lengths.astype("<i8").tobytes())
        self._places.write(places.astype("<i8").tobytes())
        for name in self._columns:
            self._files[column_file(name)].write((columns or {})[name].astype("<f4").tobytes())
        self.counts.n_docs += len(lengths)
        self.counts.n_tokens += len(tokens)
        self.counts.n_trained += int(np.count_nonzero(trained))
        self.counts.max_token = max(self.counts.max_token, int(tokens.max()))

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
        self._lengths.flush()
        lengths = np.fromfile(self._partial / _LENGTHS, "<i8")
        with (self._partial / "offsets.npy").open("wb") as file:
            np.save(file, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
            _sync(file)
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
            **{name: getattr(self.counts, name) for name in shared},
        )
        with (self._partial / "manifest.json").open("w", encoding="utf-8") as text:
            json.dump(dataclasses.asdict(manifest), text, indent=1)
            _sync(text)
        for written in self._files.values():
            _sync(written)
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


_LENGTHS = "lengths.bin"
_HASHES = "hashes.bin"
_JOURNAL = "shards.jsonl"


def column_file(name: str) -> str:
    return f"column.{name}.bin"


def _finished_shards(directory: Path, sizes: Callable[[Counts], Mapping[str, int]]) -> Iterator[Counts]:
    """Yield the counts at the end of each shard whose data is in the files; nothing for a damaged directory."""
    try:
        lines = (directory / _JOURNAL).read_text(encoding="utf-8").splitlines()
        present = {name: (directory / name).stat().st_size for name in sizes(Counts())}
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            counts = Counts(**json.loads(line))
            if len(counts.bits) != counts.n_tokens % 8 or any(
                present[name] < size for name, size in sizes(counts).items()
            ):
                return
        except (ValueError, TypeError):  # the last line, if the process was killed while writing it
            return
        yield counts


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


_LOCK_SECONDS = 5.0
"""Between two calls of `moved`."""


@contextmanager
def cache_lock(path: Path, notice: Callable[[str], None], moved: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock while the block runs. Calls `notice` once if another process has it, and `moved` while it does."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        notice(f"waiting for another process that is tokenising the same data ({path})")
        while not lock.is_locked:
            moved(f"waiting for another process that is tokenising the same data ({path})")
            with suppress(filelock.Timeout):
                lock.acquire(timeout=_LOCK_SECONDS)
    try:
        yield
    finally:
        lock.release()
