"""Ranks that send each other bytes through the host: of processes on CPUs, and to debug, of processes that share a GPU.

torch's gloo moves the bytes, and sums are ours: gloo refuses FP8, and adds in another order. Each rank has a process
group of its own, so a process may have several.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...api import Span, World
from ...api.world import CollectiveError
from ...errors import ConfigError
from ...reference.rounding import TORCH_DTYPES
from .exchange import SECONDS, ExchangingComm, Item, Use
from .spans import current, nbytes, tensor

_POLL = timedelta(milliseconds=100)


class GlooComm(ExchangingComm):
    """The `Comm` of a rank. On a GPU a call waits for its stream."""

    def __init__(self, group: Any, rank: int, world_size: int, device: int, seconds: float) -> None:
        """`group` is a ProcessGroupGloo."""
        super().__init__(rank, world_size, device)
        self._group = group
        self._seconds = seconds
        self._aborted = False

    def barrier(self, stream: int) -> None:
        with current(stream, self.device):
            _finish(stream)
            self._send("barrier", [torch.zeros(1, dtype=torch.uint8)] * self.world_size, [1] * self.world_size)

    def abort(self) -> None:
        self._aborted = True

    def _exchange(self, what: str, stream: int, *stages: tuple[Sequence[Item], Use]) -> None:
        with current(stream, self.device):
            for items, use in stages:
                use(self._received(what, items, stream))

    def _received(self, what: str, items: Iterable[Item], stream: int) -> Iterator[Sequence[Tensor]]:
        """Yield what the ranks give, in memory of the host that is freed when the next item follows."""
        for given, taken in items:
            parts = self._send(what, _sent(given, stream), [nbytes(span) for span in taken])
            yield [part.view(TORCH_DTYPES[dtype]) for part, (_, _, dtype) in zip(parts, taken, strict=True)]
            _finish(stream)

    def _send(self, what: str, sent: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
        """Send part r to rank r, and return what the ranks sent: `sizes` bytes. Raises CollectiveError."""
        received, lengths = torch.empty(sum(sizes), dtype=torch.uint8), [len(part) for part in sent]
        try:
            limit = timedelta(seconds=self._seconds)
            work = self._group.alltoall_base(received, torch.cat([*sent]), [*sizes], lengths, timeout=limit)
            while not self._is_done(work):
                pass
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CollectiveError(f"rank {self.rank}, {what}, at most {self._seconds:g} s: {reason}") from error
        return received.split([*sizes])

    def _is_done(self, work: Any) -> bool:
        """Wait a short time, because gloo cannot end a transfer that waits for another rank."""
        if self._aborted:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # its destructor would wait for the transfer
            raise RuntimeError("the communicator was aborted")
        with suppress(RuntimeError):  # its time is up
            work.wait(_POLL)
        if done := bool(work.is_completed()):
            work.wait()  # raises if it failed
        return done


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


def _sent(spans: Sequence[Span], stream: int) -> list[Tensor]:
    """Return the bytes of spans in host memory: their own on a CPU, copies in pinned memory of a GPU's."""
    found = [tensor(span, stream).view(torch.uint8) for span in spans]
    if stream:
        found = [
            torch.empty(part.shape, dtype=torch.uint8, pin_memory=True).copy_(part, non_blocking=True) for part in found
        ]
        _finish(stream)
    return found


def _finish(stream: int) -> None:
    if stream:
        torch.cuda.current_stream().synchronize()
