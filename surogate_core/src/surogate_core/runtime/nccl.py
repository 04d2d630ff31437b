"""NCCL through ctypes: communicators for GPUs of one or several processes, each driven by its own thread.

torch.distributed requires a process per rank, so the few functions that are needed are bound here. `ctypes.CDLL`
releases the GIL during a call, which is required: a call may wait for the same call on another thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..api import Span, World
from ..api.world import CollectiveError, How
from ..errors import ConfigError
from .comms.spans import check_pairs, nbytes, part
from .copy_engines import CopyEngines
from .position import DevicePosition
from .threads import RankThread, join

SONAME = "libnccl.so.2"
OLDEST = 21800
"""Oldest supported version: 2.18, of 2023. Older ones are not tested."""

WITH_ENGINES = 22809
"""Oldest version whose gathers by copy engines were tried: 2.28.9, that of torch 2.11."""

DTYPES = {"int32": 2, "int64": 4, "fp32": 7, "fp64": 8, "bf16": 9}
"""`ncclDataType_t` of the dtypes that can be reduced."""

_BYTE = 1
"""`ncclDataType_t` of what is only moved."""

_SUCCESS, _IN_PROGRESS = 0, 7
_HOW = {"sum": 0, "max": 2}
"""`ncclRedOp_t` of the ways to combine values."""
_ABORT_SECONDS = 5.0
_ENQUEUE_SECONDS = 1.0


class _Id(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = (("internal", ctypes.c_char * 128),)


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_POINTER,),
    "ncclGetUniqueId": (_POINTER,),
    "ncclCommInitRank": (_POINTER, _INT, _Id, _INT),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclCommAbort": (_POINTER,),
    "ncclCommGetAsyncError": (_POINTER, _POINTER),
}
_OF_ENGINES: dict[str, tuple[Any, ...]] = {
    "ncclCommSplit": (_POINTER, _INT, _INT, _POINTER, _POINTER),
    "ncclMemAlloc": (_POINTER, _SIZE),
    "ncclMemFree": (_POINTER,),
    "ncclCommWindowRegister": (_POINTER, _POINTER, _SIZE, _POINTER, _INT),
    "ncclCommWindowDeregister": (_POINTER, _POINTER),
}
"""Functions that `CopyEngines` calls, of libraries that are not older than WITH_ENGINES."""
_TEXTS = {"ncclGetErrorString": (_INT,), "ncclGetLastError": (_POINTER,)}


class NcclError(CollectiveError):
    """A call of NCCL failed. The message contains that of NCCL."""


class Library:
    """The functions of NCCL. A call raises NcclError if it fails."""

    def __init__(self, functions: Any) -> None:
        """`functions` is a loaded library, or an object with functions of the same names."""
        self._functions = functions
        self._declare(_SIGNATURES | _TEXTS)
        if self.version >= WITH_ENGINES:
            self._declare(_OF_ENGINES)

    def _declare(self, signatures: Mapping[str, tuple[Any, ...]]) -> None:
        for name, argtypes in signatures.items():
            getattr(self._functions, name).argtypes = argtypes
            getattr(self._functions, name).restype = ctypes.c_char_p if name in _TEXTS else _INT

    @property
    def version(self) -> int:
        """Version as one number: 22703 for 2.27.3."""
        number = _INT()
        self("ncclGetVersion", ctypes.byref(number))
        return number.value

    def __call__(self, name: str, *arguments: Any) -> None:
        self.check(getattr(self._functions, name)(*arguments), name)

    def check(self, result: int, what: str) -> None:
        """Raise NcclError unless `result` means that `what` succeeded or is in progress."""
        if result in (_SUCCESS, _IN_PROGRESS):
            return
        texts = [self._functions.ncclGetErrorString(result), self._functions.ncclGetLastError(None)]
        reason = ". ".join(text.decode(errors="replace").strip().rstrip(".") for text in texts if text and text.strip())
        raise NcclError(f"{what}: NCCL error {result}: {reason}. Set NCCL_DEBUG=WARN in the environment for details.")


class NcclComm:
    """The `api.Comm` of a rank. The spans of a call are one group, hence one launch."""

    capturable = True

    def __init__(
        self, library: Library, handle: int, rank: int, world_size: int, device: int, one_process: bool
    ) -> None:
        """one_process: all ranks are threads of this process."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.position = DevicePosition(device)
        self._nccl = library
        self._handle = handle
        self._meets: torch.Tensor | None = None
        self._has_engines = one_process and library.version >= WITH_ENGINES
        self._engines: CopyEngines | None = None
        self.aborting: RankThread | None = None
        self._enqueuing = threading.Lock()

    @property
    def allocate(self) -> Callable[[int], torch.Tensor] | None:
        """See `api.Comm`: memory that copy engines reach.

        None for several processes: one of them selects algorithms for all, and the others allocate only when it has
        done so, for which it would wait here.
        """
        return self._allocate if self._has_engines else None

    @property
    def allocated(self) -> int:
        """See `api.Comm`."""
        return self._engines.allocated if self._engines else 0

    def _allocate(self, nbytes: int) -> torch.Tensor:
        with self.position.collective("the memory that gathers reach", 0):
            if self._engines is None:
                self._engines = CopyEngines(self._nccl, self._handle, self.rank, self.device)
            return self._engines.allocate(nbytes)

    def all_reduce(self, spans: Sequence[Span], how: How, stream: int) -> None:
        calls = [("ncclAllReduce", at, at, size, DTYPES[dtype], _HOW[how]) for at, size, dtype in spans]
        self._enqueue(calls, stream)

    def reduce_scatter(self, spans: Sequence[tuple[Span, Span]], how: How, stream: int) -> None:
        check_pairs("reduce_scatter", spans, self.world_size, 1)
        calls = [
            ("ncclReduceScatter", source, target, size, DTYPES[dtype], _HOW[how])
            for (source, _, _), (target, size, dtype) in spans
        ]
        self._enqueue(calls, stream)

    def all_gather(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        check_pairs("all_gather", spans, 1, self.world_size)
        calls = [("ncclAllGather", source[0], target[0], nbytes(source), _BYTE) for source, target in spans]
        engines = self._engines if self._engines and self._engines.reach_memory else None
        self._enqueue(calls, stream, engines.handle if engines else self._handle)

    def reduce(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], how: How, stream: int) -> None:
        check_pairs("reduce", spans, 1, 1)
        calls = [
            ("ncclReduce", source, target, size, DTYPES[dtype], _HOW[how], root)
            for ((source, size, dtype), (target, _, _)), root in zip(spans, roots, strict=True)
        ]
        self._enqueue(calls, stream)

    def broadcast(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], stream: int) -> None:
        check_pairs("broadcast", spans, 1, 1)
        calls = [
            ("ncclBroadcast", source[0], target[0], nbytes(source), _BYTE, root)
            for (source, target), root in zip(spans, roots, strict=True)
        ]
        self._enqueue(calls, stream)

    def all_to_all(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        check_pairs("all_to_all", spans, 1, 1)
        calls = []
        for peer in range(self.world_size):
            for pair in spans:
                for name, span in zip(("ncclSend", "ncclRecv"), pair, strict=True):
                    own = part(span, peer, self.world_size)
                    calls.append((name, own[0], nbytes(own), _BYTE, peer))
        self._enqueue(calls, stream)

    def barrier(self, stream: int) -> None:
        if self._meets is None:
            self._meets = torch.empty(1, dtype=torch.int32, device=f"cuda:{self.device}")
        self.all_reduce([(self._meets.data_ptr(), 1, "int32")], "max", stream)

    def _enqueue(self, calls: Sequence[tuple[Any, ...]], stream: int, handle: int | None = None) -> None:
        """Call functions for a communicator; None: the one without engines. Raises NcclError after `abort`."""
        handle = self._handle if handle is None else handle
        with self._enqueuing:
            if self.aborting is not None:
                raise NcclError(f"rank {self.rank}: its communicator was aborted")
            if len(calls) > 1:
                self._nccl("ncclGroupStart")
            for name, *arguments in calls:
                self._nccl(name, *arguments, handle, stream)
            if len(calls) > 1:
                self._nccl("ncclGroupEnd")

    def check(self) -> None:
        """See `api.Comm`. Raises NcclError for errors of links and peers, which occur while kernels run."""
        if self.aborting is None:
            for handle in (self._handle, *([self._engines.handle] if self._engines else [])):
                result = _INT()
                self._nccl("ncclCommGetAsyncError", handle, ctypes.byref(result))
                self._nccl.check(result.value, f"rank {self.rank}")

    def abort(self) -> None:
        """See `api.Comm`. Also called when a communicator is no longer needed.

        A separate thread calls ncclCommAbort: it ends waiting kernels at once, but returns only when every CUDA graph
        with a collective of this communicator is gone.
        """
        if self.aborting is None:
            self.aborting = RankThread(f"surogate-nccl-abort-{self.rank}")
            self.aborting.close(last=self._abort)

    def _abort(self) -> None:
        """Wait up to 1 s for a running call, because the abort frees memory that it uses.

        If it is still running then, it is blocked on a peer, and the abort goes ahead.
        """
        if self._enqueuing.acquire(timeout=_ENQUEUE_SECONDS):
            self._enqueuing.release()
        self._nccl("ncclCommAbort", self._handle)
        if self._engines is not None:
            self._engines.abort()


def new_identity(nccl: Library) -> bytes:
    """Return an identity for communicators, by which they find this process. Raises ConfigError if NCCL fails."""
    made = _Id()
    try:
        nccl("ncclGetUniqueId", ctypes.byref(made))
    except NcclError as error:
        raise ConfigError(f"gpus: NCCL does not start: {error} Or use one GPU.") from error
    return bytes(made)


def connect(world: World, nccl: Library, identity: bytes) -> tuple[NcclComm, ...]:
    """Return a communicator for each rank of this process, in order. Waits for the other processes.

    `identity` is the `new_identity` of one process. Raises ConfigError if NCCL cannot connect the GPUs.
    """
    handles = [_POINTER() for _ in world.ranks]
    try:
        nccl("ncclGroupStart")
        for handle, rank, device in zip(handles, world.ranks, world.devices, strict=True):
            with torch.cuda.device(device):
                nccl("ncclCommInitRank", ctypes.byref(handle), world.size, _Id.from_buffer_copy(identity), rank)
        nccl("ncclGroupEnd")
    except NcclError as error:
        raise ConfigError(
            f"gpus: the {world.size} GPUs of the run cannot be connected: {error} Or use one GPU."
        ) from error
    ranks, one_process = zip(handles, world.ranks, world.devices, strict=True), world.processes == 1
    return tuple(NcclComm(nccl, handle.value or 0, rank, world.size, on, one_process) for handle, rank, on in ranks)


def disconnect(comms: Sequence[NcclComm]) -> None:
    """Abort all communicators concurrently, because they wait for each other. Returns after at most 5 s."""
    for comm in comms:
        comm.abort()
    join([comm.aborting for comm in comms if comm.aborting], _ABORT_SECONDS)


def load(candidates: Iterator[tuple[str, int]] | None = None) -> Library:
    """Load NCCL: the library that this process has already loaded, else that of torch's wheel, else the system's.

    Raises ConfigError if there is none, or if it is too old.
    """
    tried = []
    for path, mode in candidates or _candidates():
        try:
            library = Library(ctypes.CDLL(path, mode=mode))
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
            continue
        if library.version < OLDEST:
            raise ConfigError(
                f"gpus: NCCL {_dotted(library.version)} ({path}) is older than {_dotted(OLDEST)}. "
                "Install a newer torch, which includes it, or use gpus: 1."
            )
        return library
    raise ConfigError(
        f"gpus: training on several GPUs needs NCCL, which was not found ({'; '.join(dict.fromkeys(tried))}). Install "
        "a CUDA build of torch, which includes it, or use gpus: 1."
    )


def _candidates() -> Iterator[tuple[str, int]]:
    yield SONAME, os.RTLD_NOW | os.RTLD_NOLOAD
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield str(Path(folder, "lib", SONAME)), os.RTLD_NOW
    yield SONAME, os.RTLD_NOW


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
