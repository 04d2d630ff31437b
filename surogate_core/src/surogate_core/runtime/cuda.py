"""The CUDA executor: bound launches, run one by one or captured once and replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..api import DeviceInfo, OpDef
from ..program.op import Program
from .arena import Buffers
from .bind import Bound, KernelFor, bind


class CudaExecutor:
    """Runs the programs of an assembly on one stream of one device.

    Life: construct (binds, times algorithms), `warm_up` once while buffers hold nothing of value, fill the weights,
    `capture`, then `run` as often as needed. Everything is enqueued; nothing waits.
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
        allow_reference: bool = False,
    ) -> None:
        self.buffers = buffers
        self.stream = stream
        with torch.cuda.stream(stream):
            self._bound: dict[str, Bound] = {
                name: bind(
                    program, ops, kernel_for, buffers, device, stream.cuda_stream, allow_reference=allow_reference
                )
                for name, program in programs.items()
            }
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
    def walk(self, program: str, after: Callable[[int], None]) -> None:
        """Enqueue `program` op by op, never a graph, and call `after` with the op's index behind every op.

        It is called on the executor's stream: torch functions see what the op has written.
        """
        with torch.cuda.stream(self.stream):
            for index, (launch, arguments) in enumerate(self._bound[program].calls):
                launch(*arguments)
                after(index)

    def warm_up(self) -> None:
        """Run everything once: loads every module, which a capture must not do. Leaves garbage in all outputs."""
        for program in self._bound:
            self.run(program)
        self.stream.synchronize()

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

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the programs that run as graphs."""
        return tuple(self._graphs)
