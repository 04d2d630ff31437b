"""Times what ranks exchange, between all GPUs of this host, by the transport of runs: milliseconds and GB/s.

    python benchmarks/collectives.py --gpus 8 --out collectives.jsonl

Each rank has a buffer in bf16 of so many MiB, of which it sends (n - 1) / n to its neighbour in a ring of n; twice for
a sum that all get. GB/s are of what a GPU sends, as a plan counts them, beside the rate that plans assume. A line is
printed, and appended to `--out` as JSON, when it is done. The median of several calls, each awaited by all ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate.world.connect import connected
from surogate.world.processes import Processes
from surogate_core.api import Comm, World
from surogate_core.machine.links import route
from surogate_core.runtime.device import training_device
from surogate_core.runtime.threads import RankThread

REPEATS = 20
MIBS = (16, 128, 1024)
WAYS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Collective -> how often it passes the bytes around the ring."""


def main() -> None:
    arguments = parse(sys.argv[1:])
    print(f"{'collective':<16}{'MiB':>6}{'ms':>10}{'GB/s':>8}{'planned':>9}", flush=True)
    for found in measure(arguments.gpus, arguments.mib or MIBS):
        figures = f"{found['ms']:>10.3f}{found['gb_per_second']:>8.1f}{found['planned_gb_per_second']:>9.1f}"
        print(f"{found['collective']:<16}{found['mib']:>6}{figures}", flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--mib", type=int, action="append", help="bytes of a buffer; default: 16, 128, 1024")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def measure(gpus: int, mibs: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each collective and size."""
    ranks, device = range(gpus), training_device()
    planned = route(device, gpus, ranks_per_device=1 if torch.cuda.is_available() else gpus).link.bandwidth
    processes = Processes(World(size=gpus, ranks=ranks, devices=ranks), inf)
    with processes.ending(), connected(processes, "auto", torch.cuda.is_available()) as comms:
        threads = [RankThread(f"rank-{comm.rank}") for comm in comms]
        for kind, ways in WAYS.items():
            for mib in mibs:
                sides = on_all(threads, comms, lambda comm, mib=mib: Side(comm, mib << 20))  # type: ignore[misc]
                seconds = on_all(threads, sides, lambda side, kind=kind: side.seconds(kind))  # type: ignore[misc]
                took = max(seconds)  # of the rank that is done last
                sent = ways * (mib << 20) * (gpus - 1) / gpus
                yield {
                    **{"collective": kind, "mib": mib, "gpus": gpus, "gpu": device.title, "ms": round(took * 1e3, 4)},
                    "gb_per_second": round(sent / took / 1e9, 2),
                    "planned_gb_per_second": round(planned / 1e9, 2),
                }
        for thread in threads:
            thread.close()


def on_all(threads: Sequence[RankThread], given: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Call `work` on the thread of each rank, and return what it returns when all are done."""
    jobs = [thread.submit(work, one) for thread, one in zip(threads, given, strict=True)]
    return [job.result() for job in jobs]


class Side:
    """A rank with its buffers: the whole of `nbytes`, and its part."""

    def __init__(self, comm: Comm, nbytes: int) -> None:
        on_gpu, part = torch.cuda.is_available(), nbytes // 2 // comm.world_size
        on = f"cuda:{comm.device}" if on_gpu else "cpu"
        allocate = comm.allocate or partial(torch.zeros, dtype=torch.uint8, device=on)
        self._comm = comm
        self._whole = allocate(2 * part * comm.world_size).view(torch.bfloat16)
        self._part = allocate(2 * part).view(torch.bfloat16)
        self._stream = torch.cuda.Stream(comm.device) if on_gpu else None
        if on_gpu:
            torch.cuda.synchronize(comm.device)

    def seconds(self, kind: str) -> float:
        """Return the time of the median call of a collective, without the first, which connects the ranks."""
        whole, part = span(self._whole), span(self._part)
        stream = self._stream.cuda_stream if self._stream else 0
        calls: dict[str, Callable[[], None]] = {
            "all_reduce": lambda: self._comm.all_reduce([whole], "sum", stream),
            "reduce_scatter": lambda: self._comm.reduce_scatter([(whole, part)], "sum", stream),
            "all_gather": lambda: self._comm.all_gather([(part, whole)], stream),
        }
        times = []
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for _ in range(REPEATS + 1):
                began = time.perf_counter()
                calls[kind]()
                if self._stream:
                    self._stream.synchronize()
                times.append(time.perf_counter() - began)
        return statistics.median(times[1:])


def span(tensor: Tensor) -> tuple[int, int, str]:
    return tensor.data_ptr(), tensor.numel(), "bf16"


if __name__ == "__main__":
    main()
