"""Ranks that send each other bytes through the host: of processes on CPUs, and to debug, of processes that share a GPU.

torch's gloo moves the bytes, and sums are ours: gloo refuses FP8, and adds in another order. Each rank has a process
group of its own, so a process may have several.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...api import Span, World
from ...api.world import CollectiveError, How, Position
from ...errors import ConfigError
from .meeting import SECONDS
from .reference import combined
from .spans import check_pairs, check_reducible, chunk, current, nbytes, part, tensor

_POLL = timedelta(milliseconds=100)

Parts = Sequence[Tensor]


class GlooComm:
    """The `Comm` of a rank. Sums are those of `reference.combined`. On a GPU a call waits for its stream."""

    capturable = False

    def __init__(self, group: Any, rank: int, world_size: int, device: int, seconds: float) -> None:
        """`group` is a ProcessGroupGloo."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.position = Position()
        self._group = group
        self._seconds = seconds
        self._aborted = False

    def all_reduce(self, spans: Sequence[Span], how: How, stream: int) -> None:
        """Combine a chunk of each span on each rank, then send it to the others."""
        check_reducible("all_reduce", spans)
        with current(stream, self.device):
            for span in spans:
                chunks = [chunk(span, rank, self.world_size) for rank in range(self.world_size)]
                own = nbytes(chunks[self.rank])
                parts = self._exchange("all_reduce", _sent(chunks, stream), [own] * self.world_size)
                total = _bytes(self._combined(parts, span, how))
                sums = self._exchange("all_reduce", [total] * self.world_size, [nbytes(c) for c in chunks])
                _receive(chunks, sums, stream)

    def reduce_scatter(self, spans: Sequence[tuple[Span, Span]], how: How, stream: int) -> None:
        check_pairs("reduce_scatter", spans, self.world_size, 1)
        check_reducible("reduce_scatter", [source for source, _ in spans])
        with current(stream, self.device):
            for source, target in spans:
                sizes = [nbytes(target)] * self.world_size
                parts = self._exchange("reduce_scatter", _sent(self._parts(source), stream), sizes)
                _receive([target], [_bytes(self._combined(parts, target, how))], stream)

    def all_gather(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        check_pairs("all_gather", spans, 1, self.world_size)
        with current(stream, self.device):
            for source, target in spans:
                sent = _sent([source], stream) * self.world_size
                sizes = [nbytes(source)] * self.world_size
                _receive(self._parts(target), self._exchange("all_gather", sent, sizes), stream)

    def reduce(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], how: How, stream: int) -> None:
        check_pairs("reduce", spans, 1, 1)
        check_reducible("reduce", [source for source, _ in spans])
        with current(stream, self.device):
            for (source, target), root in zip(spans, roots, strict=True):
                (own,) = _sent([source], stream)
                sent = [own if rank == root else own[:0] for rank in range(self.world_size)]
                sizes = [len(own) if self.rank == root else 0] * self.world_size
                received = self._exchange("reduce", sent, sizes)
                if self.rank == root:
                    _receive([target], [_bytes(self._combined(received, target, how))], stream)

    def broadcast(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], stream: int) -> None:
        check_pairs("broadcast", spans, 1, 1)
        with current(stream, self.device):
            for (source, target), root in zip(spans, roots, strict=True):
                empty = torch.empty(0, dtype=torch.uint8)
                sent = (_sent([source], stream) if self.rank == root else [empty]) * self.world_size
                sizes = [nbytes(source) if rank == root else 0 for rank in range(self.world_size)]
                _receive([target], [self._exchange("broadcast", sent, sizes)[root]], stream)

    def all_to_all(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        check_pairs("all_to_all", spans, 1, 1)
        with current(stream, self.device):
            for source, target in spans:
                sent = _sent(self._parts(source), stream)
                received = self._exchange("all_to_all", sent, [len(part) for part in sent])
                _receive(self._parts(target), received, stream)

    def barrier(self, stream: int) -> None:
        with current(stream, self.device):
            _finish(stream)
            self._exchange("barrier", [torch.zeros(1, dtype=torch.uint8)] * self.world_size, [1] * self.world_size)

    def check(self) -> None:
        """See `Comm`. Nothing happens asynchronously: calls raise."""

    def abort(self) -> None:
        self._aborted = True

    def _parts(self, span: Span) -> list[Span]:
        return [part(span, rank, self.world_size) for rank in range(self.world_size)]

    def _combined(self, parts: Parts, span: Span, how: How) -> Tensor:
        dtype = tensor((0, 0, span[2]), 0).dtype
        return combined([p.clone().view(dtype) for p in parts], how)  # clones are aligned

    def _exchange(self, name: str, sent: Parts, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Send part r to rank r, and return what the ranks sent: `sizes` bytes. Raises CollectiveError."""
        received, lengths = torch.empty(sum(sizes), dtype=torch.uint8), [len(part) for part in sent]
        try:
            limit = timedelta(seconds=self._seconds)
            work = self._group.alltoall_base(received, torch.cat([*sent]), [*sizes], lengths, timeout=limit)
            while not self._is_done(work):
                pass
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CollectiveError(f"rank {self.rank}, {name}, at most {self._seconds:g} s: {reason}") from error
        return received.split([*sizes])

    def _is_done(self, work: Any) -> bool:
        """Wait a short time, because gloo cannot end a transfer that waits for another rank."""
        if self._aborted:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # its destructor would wait for the transfer
            raise RuntimeError("the communicator was aborted")
        try:
            work.wait(_POLL)
        except RuntimeError:
            if work.is_completed():
                raise
        return bool(work.is_completed())


def connect(world: World, seconds: float = SECONDS) -> tuple[GlooComm, ...]:
    """Return a communicator for each rank of this process, in order. Waits for the other processes.

    The store of several processes has `torch_store`, a store of torch. Raises ConfigError if ranks cannot be reached.
    """
    from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    # A connection for each rank: one that waits for the others in the server would keep the next rank from coming.
    alone = world.processes == 1
    stores = [HashStore()] * len(world.ranks) if alone else [world.store.torch_store for _ in world.ranks]  # type: ignore[attr-defined]

    def one(rank: int, device: int) -> GlooComm:
        limit, store = timedelta(seconds=world.join_seconds), stores[rank - world.ranks[0]]
        group = ProcessGroupGloo(PrefixStore("gloo", store), rank, world.size, limit)
        return GlooComm(group, rank, world.size, device, seconds)

    try:
        with ThreadPoolExecutor(len(world.ranks)) as threads:  # each waits for the others
            return tuple(threads.map(one, world.ranks, world.devices))
    except RuntimeError as error:
        raise ConfigError(
            f"transport: gloo: the {world.size} ranks cannot be connected: {str(error).splitlines()[0]} Set "
            "GLOO_SOCKET_IFNAME to the network interface that connects the machines."
        ) from CollectiveError(str(error))


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def _sent(spans: Sequence[Span], stream: int) -> list[Tensor]:
    """Return the bytes of spans in host memory: their own on a CPU, copies in pinned memory of a GPU's."""
    found = [_bytes(tensor(span, stream)) for span in spans]
    if stream:
        found = [
            torch.empty(part.shape, dtype=torch.uint8, pin_memory=True).copy_(part, non_blocking=True) for part in found
        ]
        _finish(stream)
    return found


def _receive(spans: Sequence[Span], parts: Parts, stream: int) -> None:
    for span, received in zip(spans, parts, strict=True):
        _bytes(tensor(span, stream)).copy_(received)
    _finish(stream)


def _finish(stream: int) -> None:
    if stream:
        torch.cuda.current_stream().synchronize()
