"""The CUDA executor: enqueues bound launches one by one, or captures them once and replays CUDA graphs.

A graph always runs as a whole, but the number of LM-head chunks that a micro-batch needs varies. A program is therefore
split into several graphs: one up to the first launch that can be skipped, one for each of those, one for the rest.

Events fork side streams from the main one and join them again. In a captured program they become edges of the graph, so
collectives and copies overlap with the other launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..api import Call, Launch
from ..program.lanes import lane_order
from ..program.op import Lane, Op, Program, Signature
from .arena import Buffers
from .bind import BoundProgram, ExecutionContext, bind, each_once
from .collectives import sent
from .readings import PendingReading, device_readings


def order_streams(
    ops: Sequence[Op],
    launches: Sequence[tuple[Launch, ...]],
    streams: Mapping[Lane, Any],
    event: Callable[[], Any] = torch.cuda.Event,
) -> tuple[tuple[Launch, ...], ...]:
    """Return the launches of each op, with events that order the streams of the lanes as `lane_order` says.

    All side streams are joined at the end of the program, and also where a graph ends within the program, because an
    event cannot connect two graphs: before an op that has launches to skip.
    """
    compute, waits = streams["compute"], lane_order(ops).waits
    ends: dict[int, Any] = {}  # of ops on side lanes since the graph began
    last: dict[Lane, Any] = {}
    result: list[tuple[Launch, ...]] = []
    for index, (op, own) in enumerate(zip(ops, launches, strict=True)):
        stream = streams[op.lane]
        before = [(stream.wait_event, (ends[i],)) for i in waits.get(index, ()) if i in ends]
        after = []
        if op.lane != "compute":
            fork, ends[index] = event(), event()
            last[op.lane] = ends[index]
            before = [(fork.record, (compute,)), (stream.wait_event, (fork,)), *before]
            after = [(ends[index].record, (stream,))]
        elif last and any(launch.labels_above >= 0 for launch in own):
            before = [(compute.wait_event, (end,)) for end in last.values()]
            ends, last = {}, {}
        result.append((*map(Launch, before), *own, *map(Launch, after)))
    if last:
        result[-1] = (*result[-1], *(Launch((compute.wait_event, (end,))) for end in last.values()))
    return tuple(result)


class CudaExecutor:
    """Runs programs on `stream`, and ops of side lanes on streams of their own.

    Life: construct, which binds and times algorithms; `warm_up`; with several workers `connect`. All of these overwrite
    buffers. Then fill the weights, `capture`, and `run` any number of times. `run` enqueues and does not wait. To
    a worker, `ReferenceExecutor` is the same for a CPU.
    """

    def __init__(
        self, programs: Mapping[str, Program], buffers: Buffers, context: ExecutionContext, stream: torch.cuda.Stream
    ) -> None:
        """Bind all programs. Of equal notices of different kernels, only the first is shown."""
        self._rare = {n for n, p in programs.items() if p.purpose != "train" or p.stage in ("start", "derive")}
        self._stream = stream
        self._rank = context.comm.rank
        lanes = {op.lane for program in programs.values() for op in program.ops} - {"compute"}
        # With high priority: otherwise the few blocks of a collective would start too late.
        self._streams: dict[Lane, torch.cuda.Stream] = {"compute": stream}
        self._streams |= {lane: torch.cuda.Stream(stream.device, priority=-1) for lane in lanes}
        self._bound: dict[str, BoundProgram] = {}
        context = replace(context, notice=each_once(context.notice))
        addresses = {lane: stream.cuda_stream for lane, stream in self._streams.items()}
        with torch.cuda.stream(stream):
            for name, program in programs.items():
                bound = bind(program, buffers, context, addresses)
                ordered = order_streams(bound.ops, bound.launches, self._streams)
                self._bound[name] = replace(bound, launches=ordered)
        self._segments = {
            name: graph_segments(launch for launches in bound.launches for launch in launches)
            for name, bound in self._bound.items()
        }

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that programs are enqueued on."""
        return self._stream

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the programs that run as CUDA graphs."""
        return tuple(name for name, segments in self._segments.items() if segments and all(s.graph for s in segments))

    def run(self, program: str, labels: int | None = None) -> None:
        """Enqueue `program`, without the launches that a batch with `labels` labels does not need. None: with all."""
        with torch.cuda.stream(self._stream):
            for segment in self._segments[program]:
                if labels is None or labels > segment.labels_above:
                    segment.run()

    def segments_needed(self, program: str, labels: int | None) -> int:
        """Return how many graph segments of `program` a micro-batch with `labels` labels runs."""
        return sum(labels is None or labels > segment.labels_above for segment in self._segments[program])

    @torch.no_grad()
    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        """Run op by op, never as a graph. Calls `after` with the index of each op once it is enqueued, but not of those
        that other ranks own. Meanwhile the executor's stream is current, so torch functions see the results."""
        with torch.cuda.stream(self._stream):
            bound = self._bound[program]
            for index, (op, launches) in enumerate(zip(bound.ops, bound.launches, strict=True)):
                for function, arguments in (x.call for x in launches if labels is None or labels > x.labels_above):
                    function(*arguments)
                if op.lane != "compute":
                    self._stream.wait_stream(self._streams[op.lane])
                if op.owner in (None, self._rank):
                    after(index)

    def readings(self, values: Sequence[Tensor]) -> Callable[[], PendingReading]:
        """Return what reads these scalars as they are once all work enqueued so far is done.

        Call this once, before the first step, and what it returns after each step.
        """
        return device_readings(values, self._stream)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run one of all ops of a signature, but no collectives. Leaves garbage in their outputs.

        This loads every module, which is not allowed during a capture, nor while a collective waits for a peer. Ops of
        a signature have the same kernels, so that a step of long rows is not waited for.
        """
        known: set[Signature] = set()
        with torch.cuda.stream(self._stream):
            for bound in self._bound.values():
                for op, launches in zip(bound.ops, bound.launches, strict=True):
                    if op.lane != "comm" and (op.signature not in known or always_warmed_up(op)):
                        for function, arguments in (launch.call for launch in launches):
                            function(*arguments)
                    known.add(op.signature)
        self.synchronize()

    def connect(self) -> None:
        """Run every collective that differs from those before in more than its addresses, on garbage, because NCCL
        connects devices on first use.

        The other workers must call this at the same time. Each collective is awaited, so that none waits for a peer
        while the next one is prepared.
        """
        known: set[Hashable] = set()
        for bound in self._bound.values():
            for op, launches in zip(bound.ops, bound.launches, strict=True):
                calls = [launch.call for launch in launches if op.lane == "comm"]
                moved = tuple(filter(None, map(sent, calls)))
                for function, arguments in calls if moved not in known else ():
                    function(*arguments)
                    self.synchronize()
                known.update([moved] if moved else [])

    def capture(self) -> None:
        """Capture each program that runs often and supports it; `run` replays its graphs from then on. Runs nothing."""
        for program, bound in self._bound.items():
            captured = bound.capturable and program not in self._rare
            for segment in self._segments[program] if captured else ():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(self._stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    segment.run()
                    graph.capture_end()
                segment.graph = graph

    def wait(self) -> None:
        """Wait on the host until all enqueued programs are done."""
        self._stream.synchronize()

    def synchronize(self) -> None:
        """Wait on the host until all work on the device is done, including copies into the buffers."""
        torch.cuda.synchronize(self._stream.device)

    def release(self) -> None:
        """Wait for the graphs and drop them: a communicator cannot end while a graph refers to it. Nothing can run
        afterwards."""
        with suppress(RuntimeError):  # a device in an error state, which has been reported already
            self._stream.synchronize()
        for segment in (segment for segments in self._segments.values() for segment in segments):
            segment.graph = None


def always_warmed_up(op: Op) -> bool:
    """Return whether a warm-up runs all ops of the signature of an op.

    It does where a part of a value is read or written: where the part lies in its whole may select a kernel. And where
    whole numbers are written, such as the rows of each expert: kernels address memory by them, and garbage would be
    addresses outside of the buffers.
    """
    return any(v.shard for v in (*op.ins, *op.outs)) or any(v.dtype in ("int32", "int64") for v in op.outs)


@dataclass
class GraphSegment:
    """Consecutive calls that are needed by the same batches: those with more than `labels_above` labels."""

    calls: tuple[Call, ...]
    labels_above: int
    graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Replay the graph on the current stream, or make the calls if there is none."""
        if self.graph is not None:
            self.graph.replay()
            return
        for function, arguments in self.calls:
            function(*arguments)


def graph_segments(launches: Iterable[Launch]) -> list[GraphSegment]:
    """Group consecutive launches with equal `labels_above`."""
    groups = groupby(launches, lambda launch: launch.labels_above)
    return [GraphSegment(tuple(launch.call for launch in group), above) for above, group in groups]
