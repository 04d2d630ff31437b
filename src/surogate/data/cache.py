"""Tokenised datasets on disk, written once and then memory-mapped.

A dataset is a directory `<cache root>/<hash of its settings>/`:

    tokens.bin      uint16 (vocabularies of at most 65,536) or uint32, little-endian, the documents concatenated
    mask.bin        one bit per token, least significant bit first: bit i is set if token i is trained, i.e. a label
                    where it is the target
    offsets.npy     int64 [n_docs + 1]: document d is tokens offsets[d] to offsets[d + 1]
    hashes.bin      uint64 [n_docs]: a hash of the tokens of each document
    places.bin      int64 [n_docs, 2]: file and number of the row of each document, for `Source.place`
    column.NAME.bin float32 [n_tokens] or [n_docs]: a column of the dataset type
    pieces.bin      uint64: a hash of every 64 KiB of each file above (`api.proven_file`), in the manifest's order
    manifest.json   counts, settings, for each file the hash of its hashes in pieces.bin, and a hash of itself

What a start reads in full is verified when it is opened; tokens and places piece by piece, before they are first read.

`token_writer` writes it to `<hash>.partial`, syncs it and renames it. A directory named `<hash>` was therefore complete
when it got its name. damaged.txt in it names damage that was found later: the next start makes the cache anew.

Format 3, of 0.1.0 and 0.2.0, has no pieces.bin and no hashes in its manifest. It is read as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt

from surogate_core.api import Omission
from surogate_core.api.proven_file import PIECE_BYTES, DamagedFile, ProvenFile, read_piece_hashes
from surogate_core.api.sealed import unsealed

from ..machine.cache_home import cache_home

CACHE_FORMAT = 4
"""Part of the settings that a cache is named after."""
UNPROVEN = 3
"""The format before, without hashes."""

MANIFEST, PIECES, TOKENS, MASK, OFFSETS, HASHES, PLACES = (
    *("manifest.json", "pieces.bin"),
    *("tokens.bin", "mask.bin", "offsets.npy", "hashes.bin", "places.bin"),
)
_DAMAGED = "damaged.txt"

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
    settings: everything that decides the tokens; the directory is named after their hash (`cache_name`).
    files: name -> {"bytes", "pieces": the hash of its hashes in pieces.bin}.
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
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def cache_name(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


class DamagedCache(Exception):
    """A cache directory does not match its manifest. The message names the file and the mismatch."""


@dataclass(frozen=True)
class TokenDataset:
    """The documents of a dataset as token ids. The arrays are memory maps if the dataset was opened from disk.

    tokens: uint16 or uint32 [n_tokens]. mask: uint8 [ceil(n_tokens / 8)]. offsets: int64 [n_docs + 1].
    omissions: each with the first row that has it ("rows.jsonl:7"). hashes: uint64 [n_docs], of the tokens of each
    document. places: int64 [n_docs, 2], for `Source.place`, which `where` calls. columns: by name, [n_tokens] or
    [n_docs], or [n_tokens, ...] of those that the loss makes; facts: see `Prepared`. Others: as in `Manifest`.

    checks: see `Prepared`. proofs: by file name. The methods verify what they read. Whoever reads `tokens` or `places`
    itself calls `verify` before; the other arrays were verified when they were opened.
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
    settings: Mapping[str, Any] = field(default_factory=dict)
    proofs: Mapping[str, ProvenFile] = field(default_factory=dict)
    checks: Mapping[str, Callable[[Int64s], None]] = field(default_factory=dict)

    @property
    def n_docs(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def tokens_at(self, index: Int64s) -> npt.NDArray[Any]:
        self._check(TOKENS, index)
        return self.tokens[index]

    def trained(self, start: int, stop: int) -> Bools:
        """Return whether each of tokens `start` to `stop` is trained."""
        return self.trained_at(np.arange(start, stop))

    def trained_at(self, index: Int64s) -> Bools:
        bits: Bools = (self.mask[index >> 3] >> (index & 7).astype(np.uint8)) & 1 == 1
        return bits

    def column_at(self, name: str, index: Int64s) -> npt.NDArray[Any]:
        if name in self.checks:
            self.checks[name](index)
        return self.columns[name][index]

    def place(self, document: int) -> tuple[int, int]:
        """Return the file and the number of the row of a document."""
        self._check(PLACES, np.array([document]))
        file, number = self.places[document].tolist()
        return file, number

    def verify(self) -> None:
        """Verify what has not been read yet of any file. Raises DamagedFile."""
        for proof in self.proofs.values():
            proof.check_all()

    def _check(self, file: str, index: Int64s) -> None:
        proof = self.proofs.get(file)
        if proof is not None:
            proof.check(index)


def open_cache(directory: Path, made_anew: bool = True) -> TokenDataset:
    """Map a cache directory into memory. Raises DamagedCache if it differs from its manifest, or that is damaged.

    made_anew: whether the next start replaces a cache that turns out to be damaged while it is read.
    """
    manifest = read_cache_manifest(directory)
    if (directory / _DAMAGED).exists():
        raise DamagedCache((directory / _DAMAGED).read_text(encoding="utf-8"))
    dtype = np.dtype(manifest.dtype)
    expected = {TOKENS: manifest.n_tokens * dtype.itemsize, MASK: (manifest.n_tokens + 7) // 8}
    expected |= {HASHES: manifest.n_docs * 8, PLACES: manifest.n_docs * 16}
    counts = {"token": manifest.n_tokens, "document": manifest.n_docs}
    expected |= {column_file(name): 4 * counts[per] for name, per in manifest.columns.items()}
    for name, size in expected.items():
        found = (directory / name).stat().st_size if (directory / name).is_file() else -1
        if found != size:
            raise DamagedCache(f"{directory / name}: {'missing' if found < 0 else f'{found} bytes'}, expected {size}")
    proofs = _proofs(directory, manifest, dtype.itemsize, made_anew) if manifest.format == CACHE_FORMAT else {}
    try:
        for name in proofs.keys() - {TOKENS, PLACES}:  # a start reads the others in full
            proofs[name].check_all()
        offsets = np.load(directory / OFFSETS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DamagedCache(f"{directory / OFFSETS}: {error}") from error
    except DamagedFile as error:
        raise DamagedCache(error.what) from error
    ascending = len(offsets) == manifest.n_docs + 1 and bool(np.all(offsets[1:] > offsets[:-1]))
    if not ascending or offsets[0] != 0 or offsets[-1] != manifest.n_tokens:
        raise DamagedCache(f"{directory / OFFSETS}: not the offsets of {manifest.n_docs} documents")
    return TokenDataset(
        tokens=np.memmap(directory / TOKENS, dtype, "r"),
        mask=np.memmap(directory / MASK, np.uint8, "r"),
        offsets=offsets,
        n_bytes=manifest.n_bytes,
        max_token=manifest.max_token,
        n_trained=manifest.n_trained,
        path=directory,
        omissions=[(Omission(*fields), first) for *fields, first in manifest.omissions],
        empty_rows=manifest.empty_rows,
        hashes=np.memmap(directory / HASHES, "<u8", "r"),
        places=np.memmap(directory / PLACES, "<i8", "r").reshape(-1, 2),
        columns={name: np.memmap(directory / column_file(name), "<f4", "r") for name in manifest.columns},
        group=manifest.group,
        settings=manifest.settings,
        proofs=proofs,
    )


def read_cache_manifest(directory: Path) -> Manifest:
    """Read the manifest. Raises DamagedCache if it is missing or damaged, or of a directory of another name."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**(content if content.get("format") == UNPROVEN else unsealed(content)))
        settings = dict(manifest.settings)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCache(f"{path}: {error}") from error
    if manifest.format not in (UNPROVEN, CACHE_FORMAT) or manifest.dtype not in ("<u2", "<u4"):
        raise DamagedCache(f"{path}: format {manifest.format} with dtype {manifest.dtype}")
    if cache_name(settings) != directory.name:
        raise DamagedCache(f"{path}: is of another cache, {cache_name(settings)}")
    return manifest


def _proofs(directory: Path, manifest: Manifest, token_bytes: int, made_anew: bool) -> dict[str, ProvenFile]:
    """Return the proofs of all files. Raises DamagedCache if the hashes of their pieces are damaged."""
    item_bytes = {TOKENS: token_bytes, HASHES: 8, PLACES: 16, OFFSETS: 8}
    items = {name: PIECE_BYTES // item_bytes.get(name, 4) for name in manifest.files} | {MASK: PIECE_BYTES * 8}
    try:
        hashes = read_piece_hashes(directory / PIECES, manifest.files)
    except (OSError, ValueError) as error:
        raise DamagedCache(f"{directory / PIECES}: {error}") from error
    proofs = {}
    for name, file in manifest.files.items():
        found = (directory / name).stat().st_size if (directory / name).is_file() else -1
        if found != file["bytes"]:
            raise DamagedCache(f"{directory / name}: {'missing' if found < 0 else f'{found} bytes'}")
        proofs[name] = ProvenFile(directory / name, hashes[name], items[name], _damaged(directory, made_anew))
    return proofs


def _damaged(directory: Path, made_anew: bool) -> Callable[[Path, str], DamagedFile]:
    """Return a function that records damage in the directory, for the next start, and returns the error."""

    def record(path: Path, what: str) -> DamagedFile:
        note, anew = directory / _DAMAGED, made_anew
        with suppress(OSError):
            note.write_text(f"{path}: {what}", encoding="utf-8")
        remedy = "Start again: the cache is made anew."
        if not made_anew:
            remedy = "This version cannot make these tokens: copy the cache from where it is whole."
        elif not note.exists():
            anew, remedy = False, f"Remove {directory} and start again: the cache is made anew."
        return DamagedFile(f"token cache {path}: {what}", remedy, made_anew=anew)

    return record


def column_file(name: str) -> str:
    return f"column.{name}.bin"


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
