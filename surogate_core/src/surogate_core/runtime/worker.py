"""One device's share of a run: its buffers and its executor, and the few things that the loop does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..api import OpDef, Target
from ..assemble import Assembly
from ..data.loader import MicroBatch
from ..program.passes.documents import name_for
from .arena import Buffers
from .bind import KeepChoices, KernelFor, keep_nothing
from .cuda import CudaExecutor
from .inputs import Inputs
from .reference import ReferenceExecutor


class Reading(Protocol):
    """Loss and gradient norm of a step that may still be running."""

    @property
    def ready(self) -> bool:
        """Whether `values` would return at once."""
        ...

    def values(self) -> tuple[float, float]:
        """(mean loss in nats, 2-norm of the gradient before clipping). Waits until the step is done."""
        ...


class Worker:
    """Runs the programs of an assembly in the planned buffers: on the CPU by references, on a GPU by kernels.

    Life: construct, fill `params()` and the states, `start()`, then steps and evaluations.
    """

    def __init__(
        self,
        assembly: Assembly,
        buffers: Buffers,
        executor: ReferenceExecutor | CudaExecutor,
        inputs: Inputs,
        seed: int,
    ) -> None:
        self.assembly = assembly
        self.buffers = buffers
        self.executor = executor
        self._run: Callable[..., None] = executor.run
        self._watched = False
        self._inputs = inputs
        self._inputs.write("seed", seed)

    @classmethod
    def on_cpu(cls, assembly: Assembly, ops: Mapping[str, OpDef], seed: int, *, poison: bool = False) -> Worker:
        """A worker that runs the torch references. `poison`: values are destroyed when their planned life ends."""
        buffers = Buffers(assembly.memory, poison=poison)
        executor = ReferenceExecutor(assembly.all_programs, ops, buffers, poison=poison)
        return cls(assembly, buffers, executor, _inputs(assembly, buffers, None), seed)

    @classmethod
    def on_gpu(
        cls,
        assembly: Assembly,
        ops: Mapping[str, OpDef],
        seed: int,
        *,
        kernel_for: KernelFor,
        target: Target,
        notice: Callable[[str], None],
        keep_choices: KeepChoices = keep_nothing,
        index: int = 0,
        allow_reference: bool = False,
        poison: bool = False,
    ) -> Worker:
        """A worker that runs compiled kernels on GPU `index`.

        `notice` is told what they have to say, each line once; `keep_choices` is what a `BindContext` offers.

        Raises ConfigError when an op has none, or none that does what `target` asks for.
        """
        torch.cuda.set_device(index)
        stream = torch.cuda.Stream(index)
        buffers = Buffers(assembly.memory, f"cuda:{index}", poison=poison)
        stream.wait_stream(torch.cuda.current_stream())
        inputs = _inputs(assembly, buffers, stream)
        _write_documents(inputs, assembly, _a_document_a_row(assembly))
        inputs.commit()
        executor = CudaExecutor(
            *(assembly.all_programs, ops, kernel_for, buffers, target, stream, notice, keep_choices),
            allow_reference=allow_reference,
        )
        executor.warm_up()
        return cls(assembly, buffers, executor, inputs, seed)

    def params(self) -> dict[str, Tensor]:
        """Views of the model's weights, by name."""
        return {name: self.buffers.persistent(v) for name, v in self.assembly.params.items()}

    def weights_are_finite(self) -> bool:
        """Whether every weight is a finite number: an update can overflow although its gradient was finite."""
        return all(bool(param.isfinite().all()) for param in self.params().values())

    def watch(self, watcher: Callable[[str, int], None]) -> None:
        """From now on run op by op, never as graphs, and call `watcher(program, op's index)` behind every op."""

        def run(program: str, labels: int | None = None) -> None:
            self.executor.walk(program, lambda index: watcher(program, index), labels)

        self._run, self._watched = run, True

    def start(self, *, graphs: bool = True) -> None:
        """Call once, when the weights are in place: makes the masters; on a GPU captures the programs, if `graphs`."""
        if isinstance(self.executor, CudaExecutor):
            torch.cuda.synchronize()
        self._run("load")
        if graphs and not self._watched and isinstance(self.executor, CudaExecutor):
            self.executor.capture()

    def micro_step(self, batch: MicroBatch, *, first: bool, loss_scale: float, tick: int) -> None:
        """Forward and backward of one micro-batch; gradients and loss are written if `first`, else added to."""
        self._write_batch(batch, loss_scale)
        self._inputs.write("tick", tick)
        self._inputs.commit()
        self._run(self._program("micro_first" if first else "micro_next", batch), batch.n_valid)

    def update(self, *, lr: float, step: int) -> Reading:
        """Clip and apply the accumulated gradient. `step` is 1 at the first; a non-finite norm changes nothing.

        The reading's loss is the sum of loss_scale x (losses of the labels) over the micro-steps: the mean.
        """
        self._inputs.write("lr", lr)
        self._inputs.write("step", step)
        self._inputs.commit()
        self._run("update")
        values = [self.buffers.persistent(v) for v in (self.assembly.loss, self.assembly.grad_norm)]
        if isinstance(self.executor, CudaExecutor):
            reading = _Later(values, self.executor.stream)
            if self._watched:  # the watcher may end the run: no step is then left to be reported
                self.settle()
            return reading
        return _Now(float(values[0]), float(values[1]))

    def evaluate(self, batch: MicroBatch) -> float:
        """Sum of the losses of the batch's labels, in nats. Changes neither weights nor gradients."""
        self._write_batch(batch, 1.0)
        self._inputs.commit()
        self._run(self._program("evaluate", batch), batch.n_valid)
        if isinstance(self.executor, CudaExecutor):
            self.executor.stream.synchronize()
        return float(self.buffers.persistent(self.assembly.eval_loss))

    def settle(self) -> None:
        """Wait until everything that was enqueued is done, before somebody reads the weights."""
        if isinstance(self.executor, CudaExecutor):
            self.executor.stream.synchronize()

    def _program(self, name: str, batch: MicroBatch) -> str:
        """The variant of a program for the fewest documents that the batch fits in."""
        fewer = self.assembly.variants.get(name, {})
        return next((program.name for bound, program in fewer.items() if batch.n_documents <= bound), name)

    def _write_batch(self, batch: MicroBatch, loss_scale: float) -> None:
        for name in ("tokens", "targets", "positions"):
            self._inputs.write(name, getattr(batch, name))
        _write_documents(self._inputs, self.assembly, batch.cu_seqlens)
        self._inputs.write("loss_scale", loss_scale)


class _Now:
    """A reading of a step that is done."""

    ready = True

    def __init__(self, loss: float, norm: float) -> None:
        self._values = loss, norm

    def values(self) -> tuple[float, float]:
        return self._values


class _Later:
    """A reading that is copied to the host behind the step."""

    def __init__(self, values: list[Tensor], stream: torch.cuda.Stream) -> None:
        self._host = [torch.empty(v.shape, dtype=v.dtype, pin_memory=True) for v in values]
        self._event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            for host, value in zip(self._host, values, strict=True):
                host.copy_(value, non_blocking=True)
            self._event.record(stream)

    @property
    def ready(self) -> bool:
        return bool(self._event.query())

    def values(self) -> tuple[float, float]:
        self._event.synchronize()
        return float(self._host[0]), float(self._host[1])


def _inputs(assembly: Assembly, buffers: Buffers, stream: Any | None) -> Inputs:
    values = [v for v in assembly.declared if v.role == "input"]
    return Inputs(values, assembly.memory.segments["input"], buffers, stream)


def _write_documents(inputs: Inputs, assembly: Assembly, cu_seqlens: np.ndarray[Any, Any]) -> None:
    """Write the offsets for every variant. Those that they do not fit into are not run."""
    inputs.write("cu_seqlens", cu_seqlens)
    for bound in {n for variants in assembly.variants.values() for n in variants}:
        inputs.write(name_for("cu_seqlens", bound), cu_seqlens[: bound + 1])


def _a_document_a_row(assembly: Assembly) -> np.ndarray[Any, Any]:
    """cu_seqlens for a run on nothing."""
    batch = assembly.batch
    tokens = batch.tokens.shape[0]
    offsets = np.full(batch.cu_seqlens.shape, tokens, np.int32)
    rows = np.arange(0, tokens, batch.seq_len, dtype=np.int32)
    offsets[: len(rows)] = rows
    return offsets
