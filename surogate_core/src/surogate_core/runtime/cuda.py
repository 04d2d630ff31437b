"""The CUDA executor: bound launches, run one by one or captured once and replayed as CUDA graphs.

A graph is fixed, but how many chunks of the LM head a micro-batch needs is not: a program is one graph up to the first
launch that may be left out, one graph for each of those, and one for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..api import Call, Comm, Launch, OpDef, Target
from ..program.op import Program
from .arena import Buffers
from .bind import Bound, KernelFor, UseAutotuneCache, bind, each_once
from .streams import order_streams


class CudaExecutor:
    """Runs the programs of an assembly on one device: on one stream, and on another one the ops of the lane "comm".

    Life: construct (binds, times algorithms), `warm_up` and with other workers `connect` once, while buffers hold
    nothing of value, fill the weights, `capture`, then `run` as often as needed. Everything is enqueued; nothing waits.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        ops: Mapping[str, OpDef],
        kernel_for: KernelFor,
        buffers: Buffers,
        target: Target,
        stream: torch.cuda.Stream,
        notice: Callable[[str], None],
        autotune_cache: UseAutotuneCache,
        *,
        comm: Comm | None = None,
        allow_reference: bool = False,
    ) -> None:
        self.buffers = buffers
        self.stream = stream
        self._side = torch.cuda.Stream(stream.device, priority=-1)  # its few blocks go first, or would start too late
        self._bound: dict[str, Bound] = {}
        tell = each_once(notice)
        with torch.cuda.stream(stream):
            for name, program in programs.items():
                bound = bind(
                    *(program, ops, kernel_for, buffers, target, stream.cuda_stream, tell, autotune_cache),
                    allow_reference=allow_reference,
                    comm=comm,
                    comm_stream=self._side.cuda_stream,
                )
                self._bound[name] = replace(bound, parts=order_streams(bound.ops, bound.parts, stream, self._side))
        self._segments = {
            name: graph_segments(part for op in b.parts for part in op) for name, b in self._bound.items()
        }

    def run(self, program: str, labels: int | None = None) -> None:
        """Enqueue `program`: graphs where they were captured, else launch by launch.

        labels: how many the micro-batch has; None: as many as it could.
        """
        with torch.cuda.stream(self.stream):
            for segment in self._segments[program]:
                if labels is None or labels > segment.above:
                    segment.run()

    def segments_needed(self, program: str, labels: int | None) -> int:
        """Return how many graph segments of `program` a micro-batch with `labels` labels runs."""
        return sum(labels is None or labels > segment.above for segment in self._segments[program])

    @torch.no_grad()
    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        """`run` op by op, never a graph, and call `after` with the op's index behind every op.

        It is called on the executor's stream: torch functions see what the op has written.
        """
        with torch.cuda.stream(self.stream):
            bound = self._bound[program]
            for index, (op, parts) in enumerate(zip(bound.ops, bound.parts, strict=True)):
                for launch, arguments in (p.call for p in parts if labels is None or labels > p.above):
                    launch(*arguments)
                if op.lane == "comm":
                    self.stream.wait_stream(self._side)
                after(index)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run everything but collectives once: loads every module, which a capture must not do, nor anybody while a
        collective waits. Leaves garbage in all outputs."""
        with torch.cuda.stream(self.stream):
            for bound in self._bound.values():
                for launch, arguments in _calls(bound, "compute"):
                    launch(*arguments)
        torch.cuda.synchronize(self.stream.device)

    def connect(self) -> None:
        """Run every collective once, on garbage, at the same time as all other workers: ways between devices are made
        on first use. Each is awaited, so that none waits for a peer while the next one is prepared."""
        for bound in self._bound.values():
            for launch, arguments in _calls(bound, "comm"):
                launch(*arguments)
                torch.cuda.synchronize(self.stream.device)

    def capture(self) -> None:
        """Capture each program that can be. Runs nothing."""
        for program, bound in self._bound.items():
            for segment in self._segments[program] if bound.capturable else ():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(self.stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    segment.run()
                    graph.capture_end()
                segment.graph = graph

    def release(self) -> None:
        """Drop the graphs, once they are done: a communicator cannot end while one refers to it."""
        with suppress(RuntimeError):  # a device in error: whoever met the error first has told it
            self.stream.synchronize()
        for segment in (s for all_of in self._segments.values() for s in all_of):
            segment.graph = None

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the programs that run as graphs."""
        return tuple(name for name, all_of in self._segments.items() if all_of and all(s.graph for s in all_of))


def _calls(bound: Bound, lane: str) -> Iterator[Call]:
    """The launches of the ops on a lane."""
    return (part.call for op, parts in zip(bound.ops, bound.parts, strict=True) if op.lane == lane for part in parts)


@dataclass
class GraphSegment:
    """Launches that run together or not at all: only where there are more than `above` labels."""

    calls: tuple[Call, ...]
    above: int
    graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Enqueue it on the current stream."""
        if self.graph is not None:
            self.graph.replay()
            return
        for launch, arguments in self.calls:
            launch(*arguments)


def graph_segments(parts: Iterable[Launch]) -> list[GraphSegment]:
    """Neighbours that are needed by the same batches, together."""
    return [GraphSegment(tuple(p.call for p in run), above) for above, run in groupby(parts, lambda part: part.above)]
