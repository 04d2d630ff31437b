"""A teacher's probabilities of the tokens of a dataset, computed once by transformers and cached beside the tokens.

A cache is a directory `<token cache>/<hash of the tokens>.distillation/<key>/`:

    ids.bin        uint16 (vocabularies of at most 65,536) or uint32 [n_tokens, k]: the teacher's likeliest tokens in
                   the place of each token, given those before it in its document
    log_probs.bin  float32 [n_tokens, k + 1]: the logarithms of their probabilities, and of that of all other tokens
    pieces.bin     uint64: a hash of every 64 KiB of both files
    manifest.json  what the key is a hash of, for each file the hash of its hashes, and a hash of itself

Both files are verified piece by piece, before their rows are first read. damaged.txt names damage that was found so:
the next start makes the cache anew. Caches of 0.2.0 and before have no hashes.

Rows of tokens that are not trained are holes in the files, which take no room on disk. A document longer than
`sequence_len` is read in pieces of that length, as rows hold them.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from xxhash import xxh3_128

from surogate_core.api import ConfigError, PrepareContext, Prepared, RunStopped, read_json_object
from surogate_core.api.proven_file import PIECE_BYTES, DamagedFile, PieceHashes, ProvenFile, read_piece_hashes
from surogate_core.api.sealed import sealed, unsealed

if TYPE_CHECKING:
    import torch

    from .options import DistillationOptions

KEY = "distillation_teacher"
FORMAT = 1

BATCH_TOKENS = 8192
"""Tokens that the teacher reads at a time, padding included."""
HEAD_ROWS = 1024
"""Tokens whose logits exist at a time."""
SAVE_SECONDS = 30.0
"""Between two records of what is done, from which an interrupted run goes on."""
LEAST_LOG = -80.0
"""Smallest logarithm that is kept, so that a reverse divergence stays finite."""
_DAMAGED = "damaged.txt"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def prepared_by(context: PrepareContext[DistillationOptions]) -> Prepared:
    """Return the columns of the loss, memory-mapped. Runs the teacher if they are not cached.

    Raises ConfigError for a teacher that does not fit the model.
    """
    o = context.options
    context.progress(f"looking for the teacher {o.distillation_teacher}")
    directory = context.find_model(o.distillation_teacher, where=KEY)
    refuse_other_tokenizer(context.model_dir, directory, o.distillation_teacher)
    vocabulary = _vocabulary(context, directory)
    longest = int(np.diff(context.offsets).max(initial=0))
    identity: dict[str, Any] = {
        "format": FORMAT,
        "teacher": content_hash(directory, context.progress),
        "tokens": context.folder.name,
        "top_k": o.distillation_top_k,
        "temperature": o.distillation_temperature,
        "vocabulary": vocabulary,
        "piece": min(longest, context.sequence_len),
    }
    key = xxh3_128(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    cache = Cache(context.folder / key, len(context.tokens), o.distillation_top_k, vocabulary, identity)
    with _explaining(cache.directory):
        if cache.damage():
            context.notice(f"{KEY}: the cache of the teacher is damaged: {cache.damage()}")
        found = cache.open()
        if found is None:
            if o.distillation_run_teacher == "never":
                raise ConfigError(
                    f"{KEY}: {o.distillation_teacher}: nothing is cached of these tokens, this teacher, top_k and "
                    f"temperature ({cache.directory}), and distillation_run_teacher is never. Set it to before, or run "
                    "surogate tokenize with it where the teacher fits."
                )
            context.folder.mkdir(parents=True, exist_ok=True)
            with _locked(cache.directory.with_suffix(".lock"), context):
                found = cache.open()  # another process may have written it meanwhile
                if found is None:
                    _write(cache, context, directory)
                    found = cache.open()
    assert found is not None, "it was just written"
    # A resumed run needs the same teacher, wherever it lies, and not that it is run at the same time. Checkpoints keep
    # these words: others would refuse older ones.
    facts = {KEY: f"files of hash {identity['teacher'][:16]}", "distillation_run_teacher": None}
    return Prepared(found, facts=facts, check=cache.checks())


def refuse_other_tokenizer(model: Path, teacher: Path, name: str) -> None:
    """Raise ConfigError unless both give each token the same id."""
    from tokenizers import Tokenizer

    vocabularies = []
    for directory in (model, teacher):
        path = directory / "tokenizer.json"
        try:
            vocabularies.append(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{KEY}: {name}: {path} cannot be read as a tokenizer: {error}") from None
    ours, theirs = vocabularies
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        first = differing[0]
        ids = " and ".join(str(of.get(first, "absent")) for of in (ours, theirs))
        raise ConfigError(
            f"{KEY}: {name} has another tokenizer than the model: {len(differing):,} tokens have other ids or are in "
            f"one alone, first {first!r} ({ids}). Use a teacher with the model's tokenizer."
        )


def _vocabulary(context: PrepareContext[DistillationOptions], directory: Path) -> int:
    """Return how many of the teacher's logits count: embeddings may have more rows than the tokenizer has tokens."""
    k, sizes = context.options.distillation_top_k, []
    for path in (context.model_dir / "config.json", directory / "config.json"):
        config = read_json_object(path, "Download it again, or name a model's directory.")
        inner = config.get("text_config")
        size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, Mapping) else None)
        if not isinstance(size, int):
            raise ConfigError(f"{KEY}: {path}: vocab_size is {size!r}, not a number. Use another model.")
        sizes.append(size)
    ours, theirs = sizes
    most = min(ours, theirs if ours <= theirs else theirs - 1)  # with a remainder if the model has more tokens
    if k > most:
        raise ConfigError(
            f"distillation_top_k: {k} is more than the {most:,} tokens of teacher ({theirs:,}) and model ({ours:,}). "
            "Use that or less."
        )
    return min(ours, theirs)


def content_hash(directory: Path, moved: Callable[[str], None]) -> str:
    """Return a hash of what a model computes: its config and weights. A process reads unchanged files once."""
    paths = sorted([directory / "config.json", *directory.glob("*.safetensors")])
    states = tuple((str(path), (found := path.stat()).st_ino, found.st_size, found.st_mtime_ns) for path in paths)
    if states not in _hashes:
        digest = xxh3_128()
        for path in paths:
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    moved(f"reading {path} for the hash of the teacher")
                    digest.update(block)
        _hashes[states] = digest.hexdigest()
    return _hashes[states]


_hashes: dict[tuple[tuple[str, int, int, int], ...], str] = {}
"""Of the models that this process has read, by their files: path, inode, size, time of the last change."""


# ------------------------------------------------------------------------------------------------------------ the cache


@dataclass(frozen=True)
class Cache:
    """The files of a teacher and a dataset. A directory of this name is complete; it is made as NAME.partial."""

    directory: Path
    tokens: int
    k: int
    vocabulary: int
    identity: Mapping[str, Any]

    @property
    def partial(self) -> Path:
        return self.directory.with_suffix(".partial")

    def files(self) -> dict[str, tuple[str, np.dtype[Any], int]]:
        """Return {column: (file, dtype, numbers of a token)}."""
        ids = np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")
        return {
            "teacher_ids": ("ids.bin", ids, self.k),
            "teacher_log_probs": ("log_probs.bin", np.dtype("<f4"), self.k + 1),
        }

    def damage(self) -> str:
        """Return what is damaged by the hashes that are read at a start; "" if nothing is."""
        if (self.directory / _DAMAGED).is_file():
            return (self.directory / _DAMAGED).read_text(encoding="utf-8")
        try:
            self._hashes()
        except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:
            return f"{self.directory}: {error}" if self.directory.is_dir() else ""
        return ""

    def _hashes(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the hashes of the pieces of each file; none of a cache of 0.2.0. Raises if they are damaged."""
        manifest = read_json_object(self.directory / "manifest.json")
        if manifest == self.identity:
            return {}
        files = unsealed(manifest)["files"]
        try:
            return read_piece_hashes(self.directory / "pieces.bin", files)
        except ValueError as error:
            raise ValueError(f"pieces.bin: {error}") from None

    def checks(self) -> dict[str, Callable[[Any], None]]:
        """Return for each column a function that verifies rows of it."""
        hashes = self._hashes()
        return {
            column: _check_of(ProvenFile(self.directory / name, hashes[name], PIECE_BYTES, self._damaged), width)
            for column, (name, dtype, numbers) in self.files().items()
            if name in hashes and (width := numbers * dtype.itemsize)
        }

    def _damaged(self, path: Path, what: str) -> DamagedFile:
        note = self.directory / _DAMAGED
        with suppress(OSError):
            note.write_text(f"{path}: {what}", encoding="utf-8")
        remedy = (
            "Start again: the teacher is run anew." if note.exists() else f"Remove {self.directory}, and start again."
        )
        return DamagedFile(f"cache of the teacher {path}: {what}", remedy, made_anew=note.exists())

    def open(self) -> dict[str, Any] | None:
        """Map the columns into memory. None if they are not there, or their files are not whole."""
        columns = {}
        if self.damage():
            return None
        for column, (name, dtype, width) in self.files().items():
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != self.tokens * width * dtype.itemsize:
                return None
            columns[column] = np.memmap(path, dtype, "r", shape=(self.tokens, width))
        return columns


def _check_of(proof: ProvenFile, width: int) -> Callable[[Any], None]:
    """Return a function that verifies rows of `width` bytes."""
    within = np.array([*range(0, width, PIECE_BYTES), width - 1])

    def check(rows: np.ndarray[Any, Any]) -> None:
        proof.check((rows.reshape(-1, 1) * width + within).ravel())

    return check


@contextmanager
def _explaining(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise RunStopped(
                f"cache of the teacher {directory}: the disk is full. Free space, lower distillation_top_k, or set "
                "XDG_CACHE_HOME to another disk."
            ) from error
        raise ConfigError(
            f"cache of the teacher {directory}: {error}. Set XDG_CACHE_HOME to a writable folder."
        ) from error


@contextmanager
def _locked(path: Path, context: PrepareContext[DistillationOptions]) -> Iterator[None]:
    """Hold the lock: one process runs the teacher, others of the same run wait."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        context.notice(f"{KEY}: waiting for another process that runs the teacher over the same data ({path})")
        while not lock.is_locked:
            context.progress("waiting for another process that runs the teacher")
            with suppress(Timeout):
                lock.acquire(timeout=5.0)
    try:
        yield
    finally:
        lock.release()


class _Files:
    """The files that are written, and how many batches of the teacher they hold."""

    def __init__(self, cache: Cache, stack: ExitStack) -> None:
        cache.partial.mkdir(exist_ok=True)
        self._journal = cache.partial / "done.json"
        self._open = {}
        for column, (name, dtype, width) in cache.files().items():
            file = os.open(cache.partial / name, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, file)
            os.ftruncate(file, cache.tokens * width * dtype.itemsize)
            self._open[column] = file, dtype, width * dtype.itemsize
        try:
            self.done = int(json.loads(self._journal.read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            self.done = 0
        self._saved = time.monotonic()

    def write(self, column: str, first: int, rows: np.ndarray[Any, Any]) -> None:
        """Write rows of consecutive tokens. Raises OSError if the disk is full."""
        file, dtype, size = self._open[column]
        data = memoryview(rows.astype(dtype).tobytes())
        at = first * size
        while data:
            count = os.pwrite(file, data, at)
            data, at = data[count:], at + count

    def finished(self, batch: int, last: bool) -> None:
        """Record from time to time that all batches up to this one are in the files."""
        if not last and time.monotonic() - self._saved < SAVE_SECONDS:
            return
        for file, *_ in self._open.values():
            os.fsync(file)
        fresh = self._journal.with_suffix(".new")
        fresh.write_text(json.dumps(batch + 1))
        fresh.replace(self._journal)
        self._saved = time.monotonic()


# ---------------------------------------------------------------------------------------------------------- the teacher


@dataclass(frozen=True)
class _Piece:
    """`length` tokens from `start` that the teacher reads. Its outputs are rows start + 1 to `stop`, exclusive."""

    start: int
    length: int
    stop: int


def _batches_of(offsets: Any, trained: Callable[[int, int], Any], longest: int) -> list[list[_Piece]]:
    """Return the pieces with a trained token, the longest first, in batches of about equal length."""
    pieces = []
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for start in range(first, end, longest):
            length = min(longest, end - start)
            stop = min(start + length + 1, end)  # the last output is the next piece's first token
            if stop > start + 1 and trained(start + 1, stop).any():
                pieces.append(_Piece(start, length, stop))
    pieces.sort(key=lambda piece: (-piece.length, piece.start))
    batches: list[list[_Piece]] = []
    for piece in pieces:
        if batches and (len(batches[-1]) + 1) * batches[-1][0].length <= BATCH_TOKENS:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return batches


def _write(cache: Cache, context: PrepareContext[DistillationOptions], directory: Path) -> None:
    """Run the teacher over all trained tokens, from where an interrupted process stopped."""
    import torch

    name, began = context.options.distillation_teacher, time.monotonic()
    batches = _batches_of(context.offsets, context.trained, context.sequence_len)
    reads = sum(piece.length for batch in batches for piece in batch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as stack:
        files = _Files(cache, stack)
        where = f", after the {files.done:,} of {len(batches):,} batches of an interrupted run" if files.done else ""
        context.notice(f"{KEY}: {name} reads {reads:,} tokens on {device}{where}; later runs use {cache.directory}")
        try:
            context.progress(f"loading the teacher {name}")
            teacher = Teacher(directory, name, cache.vocabulary, device)
            for number, batch in enumerate(batches):
                if number < files.done:
                    continue
                context.progress(f"running the teacher, batch {number + 1:,} of {len(batches):,}")
                _run(teacher, batch, files, context)
                files.finished(number, number + 1 == len(batches))
        except torch.OutOfMemoryError as error:
            raise RunStopped(
                f"{KEY}: {name} does not fit on {device}. Run surogate tokenize with this config where it fits, and "
                "use the token cache of that machine."
            ) from error
    _prove(cache, context)
    (cache.partial / "done.json").unlink(missing_ok=True)
    if cache.directory.exists():  # damaged
        shutil.rmtree(cache.directory)
    cache.partial.rename(cache.directory)
    del teacher
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    context.notice(f"{KEY}: {reads:,} tokens read in {time.monotonic() - began:,.0f} s")


def _prove(cache: Cache, context: PrepareContext[DistillationOptions]) -> None:
    """Hash the files, which are written in no order, and write the manifest."""
    files = {}
    with (cache.partial / "pieces.bin").open("wb") as pieces:
        for name, dtype, width in cache.files().values():
            hashes, size = PieceHashes(), cache.tokens * width * dtype.itemsize
            with (cache.partial / name).open("rb") as file:
                while hashes.bytes < size:
                    context.progress(f"hashing {cache.partial / name}")
                    hashes.read(file, 1 << 28)
            pieces.write(hashes.array().tobytes())
            files[name] = {"bytes": size, "pieces": hashes.digest()}
    (cache.partial / "manifest.json").write_text(json.dumps(sealed({**cache.identity, "files": files}), indent=1))


def _run(teacher: Teacher, batch: list[_Piece], files: _Files, context: PrepareContext[DistillationOptions]) -> None:
    o = context.options
    ids = np.zeros((len(batch), batch[0].length), np.int64)  # padding follows, which no token before it sees
    for row, piece in zip(ids, batch, strict=True):
        row[: piece.length] = context.tokens[piece.start : piece.start + piece.length]
    trained = [context.trained(piece.start + 1, piece.stop) for piece in batch]
    wanted = np.concatenate([np.flatnonzero(of) + i * ids.shape[1] for i, of in enumerate(trained)])
    top, log_probs = teacher.top(ids, wanted, o.distillation_top_k, o.distillation_temperature)
    at = 0
    for piece, of in zip(batch, trained, strict=True):
        rows = np.flatnonzero(of)
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
            if len(run):
                first, stop = piece.start + 1 + int(run[0]), at + len(run)
                files.write("teacher_ids", first, top[at:stop])
                files.write("teacher_log_probs", first, log_probs[at:stop])
                at = stop


class Teacher:
    """A causal language model of transformers, in the dtype of its files, forward only."""

    def __init__(self, directory: Path, name: str, vocabulary: int, device: str) -> None:
        """Load it. Raises ConfigError if transformers cannot."""
        import torch
        from transformers import AutoModelForCausalLM

        self._name, self._vocabulary = name, vocabulary
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", use_safetensors=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # exceptions of several libraries
            first = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(f"{KEY}: {name}: transformers cannot load it: {type(error).__name__}: {first}") from error
        self._model = model.to(device).eval().requires_grad_(False)
        config = self._model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._positions = getattr(config, "max_position_embeddings", None)
        self._checked = False

    def top(
        self, ids: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], k: int, temperature: float
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return of the `wanted` of the flattened positions [rows x length]: ids [n, k], log-probabilities [n, k + 1].

        The last is that of all tokens but the k. Raises ConfigError for a teacher that cannot read `ids`.
        """
        import torch

        if self._positions is not None and ids.shape[1] > self._positions:
            raise ConfigError(
                f"{KEY}: {self._name} reads at most {self._positions:,} tokens, but documents are of {ids.shape[1]:,}. "
                "Lower sequence_len, or use another teacher."
            )
        device = self._model.device
        with torch.inference_mode():
            given = torch.from_numpy(ids).to(device)
            hidden = self._model.base_model(input_ids=given, use_cache=False).last_hidden_state
            self._check(given, hidden)
            flat = hidden.flatten(0, 1)
            found = [
                _top(self._logits(flat[rows]), k, temperature)
                for rows in torch.from_numpy(wanted).to(device).split(HEAD_ROWS)
            ]
            top, log_probs = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
        if not np.isfinite(log_probs).all():
            raise ConfigError(f"{KEY}: {self._name}: its logits hold NaN or inf. Use another teacher.")
        return top, log_probs

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.get_output_embeddings()(hidden)[:, : self._vocabulary].float()
        return self._softcap * (logits / self._softcap).tanh() if self._softcap else logits

    def _check(self, ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Refuse, once, a model that computes its logits in another way than from its last hidden state by its head."""
        if self._checked:
            return
        self._checked, some = True, slice(0, 16)
        whole = self._model(input_ids=ids[:1, some], use_cache=False).logits[0, :, : self._vocabulary].float()
        ours = self._logits(hidden[0, some])
        if not float((ours - whole).norm()) <= 0.02 * float(whole.norm()):
            raise ConfigError(
                f"{KEY}: {self._name}: its logits are not the product of its last hidden state and its head. Such "
                "models are not read yet: use another teacher."
            )


def _top(logits: torch.Tensor, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    logits = logits / temperature
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(k, -1)
    others = logits.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    log_probs = (torch.cat((values, others), 1) - total).nan_to_num(nan=torch.nan, neginf=LEAST_LOG)
    return ids, log_probs.clamp(min=LEAST_LOG)
