"""Fills planned buffers from the host on all CPU cores, so that random draws, reads and copies overlap.

A single thread draws 250 million random numbers per second and copies pageable memory at a few GB/s, which takes 45 s
for a model of 8B parameters. Each thread here has its own pinned memory and CUDA stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import torch
from torch import Tensor

STAGE_BYTES = 4 << 20
STAGES = 2


class Upload:
    """Copies from the host into planned buffers on any device. Each thread has its own."""

    def __init__(self) -> None:
        self._stages: list[tuple[Tensor, torch.cuda.Event]] = []
        self._stream: torch.cuda.Stream | None = None
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, on the host, to the contiguous `target` of the same shape, and convert its dtype.

        `source` may be changed when this returns. `target` is complete after `finish`.
        """
        if target.device.type != "cuda":
            target.copy_(source)
            return
        flat, flat_source = target.view(-1), source.reshape(-1)
        size = STAGE_BYTES // target.element_size()
        for start in range(0, flat.numel(), size):
            part = flat[start : start + size]
            memory, event = self._next_stage(target.device)
            pinned = memory[: part.numel() * part.element_size()].view(part.dtype)
            pinned.copy_(flat_source[start : start + size])
            with torch.cuda.stream(self._stream):
                part.copy_(pinned, non_blocking=True)
                event.record(self._stream)

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _next_stage(self, device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            memory = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
            self._stages = [(stage, torch.cuda.Event()) for stage in memory]
        self._turn = (self._turn + 1) % STAGES
        stage, event = self._stages[self._turn]
        event.synchronize()  # the last copy from this stage
        return stage, event


def fill(jobs: Iterable[Callable[[Upload], None]]) -> None:
    """Run the jobs on one thread per core, in order. Raises the exception of the first job that failed.

    Within a job torch uses a single thread, so that jobs do not compete for cores.
    """
    left, lock = iter(jobs), Lock()
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(1)  # for this thread and for later ones, so it is restored below
        upload = Upload()
        while True:
            with lock:
                job = next(left, None)
            if job is None:
                break
            job(upload)
        upload.finish()

    workers = len(os.sched_getaffinity(0))
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="fill") as pool:
            done = [pool.submit(work) for _ in range(workers)]
        for future in done:
            future.result()
    finally:
        torch.set_num_threads(threads)


def upload(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy (target, source on the host) pairs as `Upload.copy` does, on all cores."""
    fill(partial(_upload, *pair) for pair in pairs)


def _upload(target: Tensor, source: Tensor, by: Upload) -> None:
    by.copy(target, source)
