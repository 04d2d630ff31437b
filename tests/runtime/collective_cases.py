"""The collectives on random values: what `api.Comm` promises, for any transport and device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import Comm, Span
from surogate_core.api.world import REDUCIBLE, CollectiveError
from surogate_core.dtypes import DTYPES
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.comms.exchange import combined

SIZES = (1, 7, 64, 1000)
"""Elements of spans of a reduction, or of a part."""


def values(dtype: str, elements: int, seed: int, device: str) -> Tensor:
    """Random elements, with large differences of size, so that the order of a sum changes its bits."""
    generator = torch.Generator().manual_seed(seed)
    kind = TORCH_DTYPES[dtype]
    if dtype not in REDUCIBLE:
        nbytes = DTYPES[dtype].nbytes(elements)
        return torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8).view(kind).to(device)
    if not kind.is_floating_point:
        return torch.randint(-1000, 1000, (elements,), generator=generator, dtype=kind).to(device)
    scale = 10 ** (4 * torch.rand(elements, generator=generator) - 2)
    return (torch.randn(elements, generator=generator) * scale).to(kind).to(device)


def span(tensor: Tensor, dtype: str) -> Span:
    return tensor.data_ptr(), tensor.numel() * 8 * tensor.element_size() // DTYPES[dtype].bits, dtype


def on_all(comms: Sequence[Comm], work: Callable[[Comm], Any]) -> list[Any]:
    """Call `work` for every rank on a thread of its own, and return or raise what they do."""
    with ThreadPoolExecutor(len(comms)) as threads:
        return [future.result(120) for future in [threads.submit(work, comm) for comm in comms]]


def error_after_abort(waiting: Comm, aborted: Comm) -> str:
    """Return the error of a rank that waits in a barrier when a communicator is aborted."""
    failed: list[str] = []

    def wait() -> None:
        try:
            waiting.barrier(0)
        except CollectiveError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    aborted.abort()
    thread.join(5)
    (text,) = failed
    return text


# The collectives as functions from the values of all ranks to the results of all ranks.


def all_reduce(values: Sequence[Tensor], how: str) -> list[Tensor]:
    return [combined(values, how)] * len(values)


def reduce_scatter(values: Sequence[Tensor], how: str) -> list[Tensor]:
    return list(combined(values, how).chunk(len(values)))


def all_gather(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([*values])] * len(values)


def to_root(values: Sequence[Tensor], root: int, how: str) -> list[Tensor]:
    """The `reduce` of a communicator. Ranks other than the root keep what they have."""
    return [combined(values, how) if rank == root else value for rank, value in enumerate(values)]


def broadcast(values: Sequence[Tensor], root: int) -> list[Tensor]:
    return [values[root]] * len(values)


def all_to_all(values: Sequence[Tensor]) -> list[Tensor]:
    parts = [value.chunk(len(values)) for value in values]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(values))]


def check_collectives(comms: Sequence[Comm], kind: str = "cpu") -> None:
    """Compare every collective of `comms`, all ranks of a world, with the references, to the bit.

    With the kind "cuda", the memory of a rank is on its GPU.
    """
    n = len(comms)
    devices = ["cpu" if kind == "cpu" else f"cuda:{comm.device}" for comm in comms]
    for name, dtype, sent, received, expected, call in _cases(devices):
        ins, outs = sent, received if received is not None else sent

        def work(comm: Comm, ins: Any = ins, outs: Any = outs, dtype: str = dtype, call: Any = call) -> None:
            given = [(span(i, dtype), span(o, dtype)) for i, o in zip(ins[comm.rank], outs[comm.rank], strict=True)]
            if kind == "cpu":
                call(comm, given, 0)
                return
            torch.cuda.set_device(comm.device)
            stream = torch.cuda.Stream(comm.device)
            call(comm, given, stream.cuda_stream)
            stream.synchronize()

        for device in devices if kind != "cpu" else ():
            torch.cuda.synchronize(device)
        on_all(comms, work)
        for rank in range(n):
            for got, want in zip(outs[rank], expected[rank], strict=True):
                same = torch.equal(got.cpu().view(torch.uint8), want.contiguous().view(torch.uint8))
                assert same, f"{name} of {dtype}, rank {rank} of {n}: {got[:8]}, expected {want[:8]}"


Case = tuple[str, str, list[list[Tensor]], list[list[Tensor]] | None, list[list[Tensor]], Callable[..., None]]


def _cases(devices: Sequence[str]) -> Iterator[Case]:
    n = len(devices)

    def given(dtype: str, sizes: Sequence[int]) -> list[list[Tensor]]:
        return [
            [values(dtype, size, 100 * rank + i, devices[rank]) for i, size in enumerate(sizes)] for rank in range(n)
        ]

    def by_span(function: Callable[[list[Tensor]], list[Tensor]], ranks: list[list[Tensor]]) -> list[list[Tensor]]:
        """Apply a reference to each span. Return the results of each rank."""
        results = [function([t.clone().cpu() for t in of_ranks]) for of_ranks in zip(*ranks, strict=True)]
        return [list(of_rank) for of_rank in zip(*results, strict=True)]

    def by_root(function: Callable[..., list[Tensor]], ranks: list[list[Tensor]], *how: str) -> list[list[Tensor]]:
        """Apply a reference to each span with its root. Return the results of each rank."""
        spans = [[t.clone().cpu() for t in of_ranks] for of_ranks in zip(*ranks, strict=True)]
        results = [function(of_ranks, root, *how) for of_ranks, root in zip(spans, roots, strict=True)]
        return [list(of_rank) for of_rank in zip(*results, strict=True)]

    roots = [(n - 1 - i) % n for i in range(len(SIZES))]
    for dtype in DTYPES:
        packed = 8 // DTYPES[dtype].bits if DTYPES[dtype].bits < 8 else 1
        sizes = [size * packed for size in SIZES]
        wide = [size * n for size in sizes]
        for how in ("sum", "max") if dtype in REDUCIBLE else ():
            ranks = given(dtype, sizes)
            want = by_span(lambda v, how=how: all_reduce(v, how), ranks)  # type: ignore[misc]
            yield (f"all_reduce({how})", dtype, ranks, None, want,
                   lambda c, s, stream, how=how: c.all_reduce([i for i, _ in s], how, stream))  # fmt: skip
            for in_place in (False, True):
                ranks = given(dtype, wide)
                want = by_span(lambda v, how=how: reduce_scatter(v, how), ranks)  # type: ignore[misc]
                outs = [[t.chunk(n)[rank] if in_place else t.chunk(n)[rank].clone() for t in ranks[rank]]
                        for rank in range(n)]  # fmt: skip
                yield (f"reduce_scatter({how})", dtype, ranks, outs, want,
                       lambda c, s, stream, how=how: c.reduce_scatter(s, how, stream))  # fmt: skip
                ranks = given(dtype, sizes)
                want = by_root(to_root, ranks, how)
                outs = ranks if in_place else [[t.clone() for t in of_rank] for of_rank in ranks]
                yield (f"reduce({how})", dtype, ranks, outs, want,
                       lambda c, s, stream, how=how: c.reduce(s, roots, how, stream))  # fmt: skip
        for in_place in (False, True):
            outs = [[torch.zeros_like(values(dtype, size, 0, device)) for size in wide] for device in devices]
            ranks = given(dtype, sizes)
            want = by_span(all_gather, ranks)
            if in_place:
                parts = [[out.chunk(n)[rank] for out in outs[rank]] for rank in range(n)]
                for part, source in zip(chain(*parts), chain(*ranks), strict=True):
                    part.copy_(source)
                ranks = parts
            yield "all_gather", dtype, ranks, outs, want, lambda c, s, stream: c.all_gather(s, stream)
            ranks = given(dtype, sizes)
            want = by_root(broadcast, ranks)
            outs = ranks if in_place else [[torch.zeros_like(t) for t in of_rank] for of_rank in ranks]
            yield "broadcast", dtype, ranks, outs, want, lambda c, s, stream: c.broadcast(s, roots, stream)
        ranks = given(dtype, wide)
        outs = [[torch.zeros_like(t) for t in of_rank] for of_rank in ranks]
        want = by_span(all_to_all, ranks)
        yield "all_to_all", dtype, ranks, outs, want, lambda c, s, stream: c.all_to_all(s, stream)
    yield "barrier", "fp32", [[] for _ in range(n)], None, [[] for _ in range(n)], lambda c, s, st: c.barrier(st)
