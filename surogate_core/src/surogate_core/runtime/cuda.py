"""The CUDA executor: bound launches, run one by one or captured once and replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from ..api import Comm, DeviceInfo, OpDef
from ..program.op import Program
from .arena import Buffers
from .bind import Bound, KernelFor, bind
from .streams import in_lanes


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
        device: DeviceInfo,
        stream: torch.cuda.Stream,
        *,
        comm: Comm | None = None,
        allow_reference: bool = False,
    ) -> None:
        self.buffers = buffers
        self.stream = stream
        side = torch.cuda.Stream(stream.device, priority=-1)  # its few blocks go first, or they would start too late
        self._bound: dict[str, Bound] = {}
        with torch.cuda.stream(stream):
            for name, program in programs.items():
                bound = bind(
                    *(program, ops, kernel_for, buffers, device, stream.cuda_stream),
                    allow_reference=allow_reference,
                    comm=comm,
                    comm_stream=side.cuda_stream,
                )
                self._bound[name] = replace(bound, calls=in_lanes(bound.ops, bound.calls, stream, side))
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def run(self, program: str) -> None:
        """Enqueue `program`: a graph's replay if it was captured, else launch by launch."""
        graph = self._graphs.get(program)
        with torch.cuda.stream(self.stream):
            if graph is not None:
                graph.replay()
            else:
                self._launch(program)

    @torch.no_grad()
    def _launch(self, program: str) -> None:
        for launch, arguments in self._bound[program].calls:
            launch(*arguments)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run everything but collectives once: loads every module, which a capture must not do, nor anybody while a
        collective waits. Leaves garbage in all outputs."""
        with torch.cuda.stream(self.stream):
            for bound in self._bound.values():
                for op, (launch, arguments) in zip(bound.ops, bound.calls, strict=True):
                    if op.lane == "compute":
                        launch(*arguments)
        torch.cuda.synchronize(self.stream.device)

    def connect(self) -> None:
        """Run every collective once, on garbage, at the same time as all other workers: ways between devices are made
        on first use. Each is awaited, so that none waits for a peer while the next one is prepared."""
        for bound in self._bound.values():
            for op, (launch, arguments) in zip(bound.ops, bound.calls, strict=True):
                if op.lane == "comm":
                    launch(*arguments)
                    torch.cuda.synchronize(self.stream.device)

    def capture(self) -> None:
        """Capture each program that can be as one graph. Runs nothing."""
        for program, bound in self._bound.items():
            if not bound.calls or not bound.capturable:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                graph.capture_begin(capture_error_mode="thread_local")
                self._launch(program)
                graph.capture_end()
            self._graphs[program] = graph

    def release(self) -> None:
        """Drop the graphs, once they are done: a communicator cannot end while one refers to it."""
        with suppress(RuntimeError):  # a device in error: whoever met the error first has told it
            self.stream.synchronize()
        self._graphs.clear()

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the programs that run as graphs."""
        return tuple(self._graphs)
