"""The CUDA executor: bound launches, run one by one or captured once and replayed as CUDA graphs.

A graph is fixed, but how many chunks of the LM head a micro-batch needs is not: a program is one graph up to the first
launch that may be left out, one graph for each of those, and one for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch

from ..api import Call, OpDef, Part, Target
from ..program.op import Program
from .arena import Buffers
from .bind import Bound, KeepChoices, KernelFor, bind, each_once


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
        target: Target,
        stream: torch.cuda.Stream,
        notice: Callable[[str], None],
        keep_choices: KeepChoices,
        *,
        allow_reference: bool = False,
    ) -> None:
        self.buffers = buffers
        self.stream = stream
        tell = each_once(notice)
        with torch.cuda.stream(stream):
            self._bound: dict[str, Bound] = {
                name: bind(
                    *(program, ops, kernel_for, buffers, target, stream.cuda_stream, tell, keep_choices),
                    allow_reference=allow_reference,
                )
                for name, program in programs.items()
            }
        self._stretches = {name: stretches(part for op in b.parts for part in op) for name, b in self._bound.items()}

    def run(self, program: str, labels: int | None = None) -> None:
        """Enqueue `program`: graphs where they were captured, else launch by launch.

        labels: how many the micro-batch has; None: as many as it could.
        """
        with torch.cuda.stream(self.stream):
            for stretch in self._stretches[program]:
                if labels is None or labels > stretch.above:
                    stretch.run()

    @torch.no_grad()
    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        """`run` op by op, never a graph, and call `after` with the op's index behind every op.

        It is called on the executor's stream: torch functions see what the op has written.
        """
        with torch.cuda.stream(self.stream):
            for index, parts in enumerate(self._bound[program].parts):
                for launch, arguments in (p.call for p in parts if labels is None or labels > p.above):
                    launch(*arguments)
                after(index)

    def warm_up(self) -> None:
        """Run everything once: loads every module, which a capture must not do. Leaves garbage in all outputs."""
        for program in self._bound:
            self.run(program)
        self.stream.synchronize()

    def capture(self) -> None:
        """Capture each program that can be. Runs nothing."""
        for program, bound in self._bound.items():
            for stretch in self._stretches[program] if bound.capturable else ():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.stream(self.stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    stretch.run()
                    graph.capture_end()
                stretch.graph = graph

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the programs that run as graphs."""
        return tuple(name for name, all_of in self._stretches.items() if all_of and all(s.graph for s in all_of))


@dataclass
class Stretch:
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


def stretches(parts: Iterable[Part]) -> list[Stretch]:
    """Neighbours that are needed by the same batches, together."""
    return [Stretch(tuple(p.call for p in run), above) for above, run in groupby(parts, lambda part: part.above)]
