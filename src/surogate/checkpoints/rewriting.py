"""Writes the weights of a model with some tensors in another form. At most 4 GiB of them are in memory.

Tensors are computed on several threads, a few ahead of the file that is written.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from surogate_core.api import Rewritten

from .model_tensors import Copied, ModelTensor
from .stored_weights import INDEX, WEIGHTS
from .tensor_file import Stored, Writable, nbytes, write_safetensors

HELD_BYTES = 1 << 30
"""Bytes of computed tensors in memory, after which a file is written, in addition to the files of the model."""
AHEAD_BYTES = 1 << 30
"""Bytes of tensors that are read to be computed. A larger group is computed alone."""
AT_ONCE = 16
"""Groups of tensors that are computed at the same time, at most: each has intermediate results of some 10 MiB."""

Parts = Mapping[str, Tensor]


def write_weights(
    directory: Path,
    tensors: Mapping[str, ModelTensor],
    rewritten: Sequence[Rewritten] = (),
    threads: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Write a model into an empty folder: the same files, with those tensors that `rewritten` names in another form.

    Tensors of one `Rewritten` are written to the file of the first one. A file that would keep more than `HELD_BYTES`
    in memory becomes several, and then all have other names. `progress` gets how many tensors are done. For use inside
    `save_files`.
    """
    shards = _Shards(directory)
    group_of = {name: group for group in rewritten for name in group.tensors}
    order = list(dict.fromkeys(group.tensors[0] for name in tensors if (group := group_of.get(name))))
    parts = _computed([group_of[name] for name in order], tensors, threads)
    done = 0

    def advance(count: int = 1) -> None:
        nonlocal done
        done += count
        progress(done)

    seen = set[str]()
    for name, tensor in tensors.items():
        group = group_of.get(name)
        if group is None:
            shards.add(tensor.path.name, [Copied(tensor, advance)])
        elif group.tensors[0] not in seen:
            seen.add(group.tensors[0])
            found = next(parts)
            shards.add(tensor.path.name, [Stored.of(part, value) for part, value in found.items()], held=True)
            advance(len(group.tensors))
    shards.end()


class _Shards:
    """The files of weights, one after another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._of: list[tuple[str, list[str]]] = []  # the file of the model, and the tensors of each written one
        self._pending: list[Writable] = []
        self._base, self._held, self._bytes = "", 0, 0

    def add(self, base: str, tensors: Sequence[Writable], *, held: bool = False) -> None:
        """Add tensors in place of some that the file `base` of the model has. held: they are in memory."""
        if base != self._base or self._held > HELD_BYTES:
            self._flush()
            self._base = base
        self._pending += tensors
        self._held += sum(map(nbytes, tensors)) if held else 0

    def _flush(self) -> None:
        if not self._pending:
            return
        write_safetensors(self._directory / f"part-{len(self._of)}", self._pending)
        self._of.append((self._base, [tensor.name for tensor in self._pending]))
        self._bytes += sum(map(nbytes, self._pending))
        self._pending, self._held = [], 0

    def end(self) -> None:
        """Give the files their names, and write their index."""
        self._flush()
        names = [base for base, _ in self._of]
        if len({*names}) < len(names):
            count = len(names)
            names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for i, name in enumerate(names):
            (self._directory / f"part-{i}").rename(self._directory / name)
        if names != [WEIGHTS]:
            weight_map = {tensor: file for file, (_, held) in zip(names, self._of, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _computed(groups: Sequence[Rewritten], tensors: Mapping[str, ModelTensor], threads: int) -> Iterator[Parts]:
    """Yield the parts of each group, in order.

    A group is computed by one thread: threads that share ops of a millisecond wait for each other longer than they
    compute. Large groups, of which few are in memory at a time, get more.
    """
    workers = max(1, min(AT_ONCE, threads))
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "export", torch.get_num_threads)  # else a thread's first op sets its number
    queue = deque[tuple[Future[Parts], int]]()
    waiting = deque((group, sum(map(_bytes_of, map(tensors.__getitem__, group.tensors)))) for group in groups)

    def compute(group: Rewritten, size: int) -> Parts:
        torch.set_num_threads(max(1, min(threads, threads * size // AHEAD_BYTES)))  # of ops of this thread
        return group.parts()

    try:
        while waiting or queue:
            while waiting and len(queue) <= workers:
                if queue and sum(size for _, size in queue) + waiting[0][1] > AHEAD_BYTES:
                    break
                group, size = waiting.popleft()
                queue.append((pool.submit(compute, group, size), size))
            done = queue[0][0].result()
            queue.popleft()
            yield done
            del done
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _bytes_of(tensor: ModelTensor) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize
