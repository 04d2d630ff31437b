"""One device's share of a run: its buffers and its executor, and the few things that the loop does with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..api import OpDef
from ..assemble import Assembly
from ..data.loader import MicroBatch
from ..memory.plan import MemoryPlan
from ..program.value import Value
from .arena import Buffers
from .reference import ReferenceExecutor


class Worker:
    """Runs the programs of an assembly on the CPU, in the planned buffers."""

    def __init__(self, assembly: Assembly, ops: Mapping[str, OpDef], seed: int, *, poison: bool = False) -> None:
        self.assembly = assembly
        self.buffers = Buffers(assembly.memory, poison=poison)
        self.executor = ReferenceExecutor(assembly.programs, ops, self.buffers, poison=poison)
        self._inputs = {
            v.name: self.buffers.persistent(v) for v in (assembly.batch.__dict__ | assembly.scalars.__dict__).values()
            if isinstance(v, Value)
        }  # fmt: skip
        self._write("seed", seed)

    @property
    def memory(self) -> MemoryPlan:
        """The plan that the buffers follow."""
        return self.assembly.memory

    def params(self) -> dict[str, Tensor]:
        """Views of the model's weights, by name."""
        return {name: self.buffers.persistent(v) for name, v in self.assembly.params.items()}

    def weights_are_finite(self) -> bool:
        """Whether every weight is a finite number: an update can overflow although its gradient was finite."""
        return all(bool(param.isfinite().all()) for param in self.params().values())

    def load(self) -> None:
        """Call once, when the weights are in place: makes the masters."""
        self.executor.run("load")

    def micro_step(self, batch: MicroBatch, *, first: bool, loss_scale: float, tick: int) -> None:
        """Forward and backward of one micro-batch; gradients and loss are written if `first`, else added to."""
        self._write_batch(batch, loss_scale)
        self._write("tick", tick)
        self.executor.run("micro_first" if first else "micro_next")

    def update(self, *, lr: float, step: int) -> None:
        """Clip and apply the accumulated gradient. `step` is 1 at the first; a non-finite norm changes nothing."""
        self._write("lr", lr)
        self._write("step", step)
        self.executor.run("update")

    def loss(self) -> float:
        """Sum of loss_scale x (losses of the labels) over the micro-steps since the last `first`: the mean, in nats."""
        return float(self.buffers.persistent(self.assembly.loss))

    def grad_norm(self) -> float:
        """2-norm of the gradient at the last update, before clipping."""
        return float(self.buffers.persistent(self.assembly.grad_norm))

    def evaluate(self, batch: MicroBatch) -> float:
        """Sum of the losses of the batch's labels, in nats. Changes neither weights nor gradients."""
        self._write_batch(batch, 1.0)
        self.executor.run("evaluate")
        return float(self.buffers.persistent(self.assembly.eval_loss))

    def _write_batch(self, batch: MicroBatch, loss_scale: float) -> None:
        for name in ("tokens", "targets", "positions", "cu_seqlens"):
            self._inputs[name].copy_(torch.from_numpy(getattr(batch, name)))
        self._write("loss_scale", loss_scale)

    def _write(self, name: str, value: float) -> None:
        self._inputs[name].fill_(value)
