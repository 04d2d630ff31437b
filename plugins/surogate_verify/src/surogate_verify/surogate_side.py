"""Our side of a comparison: runs the programs of the run op by op and reads values between the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from surogate import run
from surogate.checkpoints import hf
from surogate.checkpoints.adapter import load_adapter, trained_tensors
from surogate.checkpoints.base import load_base
from surogate.checkpoints.saved_run import model_export
from surogate_core.api import DTYPES, HFTensor
from surogate_core.assembly.assembly import Assembly
from surogate_core.planning.plan import Plan
from surogate_core.program.op import Program
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.initialize import draw_zeros, initialize
from surogate_core.runtime.team import AnyWorker

from .observed import EMBEDDING, LOGIT_POSITIONS, LOGITS, Observed, block_name
from .programs import Subject
from .rows import ComparedRows

_ADAPTER_STD = 0.02


def observe(
    subject: Subject,
    rows: ComparedRows,
    scratch: Path,
    skipped: Sequence[str],
    stored: Mapping[str, str],
    notice: Callable[[str], None],
) -> Observed:
    """Run one micro-step on `rows` and return its results.

    scratch  folder for weights that transformers cannot read from the user's files: "model" if they are drawn, and
             "adapter". Written by the first call.
    skipped  tensors of the checkpoint that belong to layers which were cut off
    stored   dtype of each param in the run that is verified; the weights are rounded to it
    """
    worker = run.make_worker(subject.run, subject.plan, notice=notice)
    try:
        _fill(subject, worker, skipped)
        for name, param in worker.params().items():
            param.copy_(param.to(TORCH_DTYPES[stored[name]]))
        _write(subject, worker, scratch)
        observed = Observed()
        documents = [document for group in rows.groups for document in group]
        worker.watch(lambda buffers: _Watcher(buffers, documents, observed, subject.plan))
        worker.start(graphs=False)
        loss_scale, group_scale = 1 / rows.batch.n_valid, 1 / max(1, rows.batch.n_groups)
        worker.micro_step(rows.batch, first=True, last=True, index=1, loss_scale=loss_scale, group_scale=group_scale)
        worker.settle()
        view = worker.buffers.persistent
        observed.loss = float(view(subject.plan.assembly.loss))
        observed.gradients = _gradients(subject.plan.assembly, view)
        if len(observed.states.keys() & map(block_name, range(subject.plan.inputs.dims.n_layers + 1))) != (
            subject.plan.inputs.dims.n_layers
        ):  # the labels do not mark the outputs of blocks
            observed.states = {name: v for name, v in observed.states.items() if name in (EMBEDDING, LOGITS)}
    finally:
        worker.close()
    return observed


class _Watcher:
    """Copies what is compared when the forward pass has written it.

    The model labels it: "embedding", if the first block reads it; "residual", the output of a block; "logits", also of
    each document of the loss's groups. Without a value of this label, logits are those of the op that writes the loss,
    if its definition says which input is the head (`OpDef.param_kinds`).
    """

    def __init__(self, buffers: Buffers, documents: Sequence[Sequence[int]], observed: Observed, plan: Plan) -> None:
        self._buffers = buffers
        self._documents = documents
        self._positions = torch.cat([torch.arange(a, b) for a, b in documents])
        self._observed = observed
        self._blocks = 0
        self._plan = plan

    def __call__(self, program: Program, index: int) -> None:
        op, name = program.ops[index], program.name
        if op.phase != "forward":
            return
        for out in op.outs:
            if len(out.shape) < 2 or (not DTYPES[out.dtype].has_grad and out.dtype != "int32"):
                continue  # the scale or the codes of a quantized copy, which have the label of its original
            if out.label == EMBEDDING and any(out in reader.ins for reader in program.ops if reader.block == 0):
                self._keep(EMBEDDING, self._buffers.view(out, name))
            elif out.label == "residual":
                self._keep(block_name(self._blocks), self._buffers.view(out, name))
                self._blocks += 1
            elif out.dtype == "int32" and all(DTYPES[value.dtype].has_grad for value in op.ins):
                choices = self._buffers.view(out, name)
                self._observed.choices.append(choices[self._positions.to(choices.device)].cpu())
                self._observed.widths.append(op.ins[0].shape[-1])
            elif out.label == LOGITS and (groups := self._plan.assembly.batch.groups) and out.shape == groups.shape[:2]:
                scores = self._buffers.view(out, name).flatten()[: len(self._documents)]
                self._observed.states[LOGITS] = scores[:LOGIT_POSITIONS, None].float().cpu().clone()
            elif out.label == LOGITS:
                self._keep(LOGITS, self._buffers.view(out, name), LOGIT_POSITIONS)
        kinds = self._plan.inputs.ops[op.kind].param_kinds
        head = next((i for i, kind in kinds.items() if kind == "head"), None)
        if self._plan.assembly.loss in op.outs and head is not None and LOGITS not in self._observed.states:
            x, w = (self._buffers.view(op.ins[i], name) for i in (0, head))
            rows = x[self._positions[:LOGIT_POSITIONS].to(x.device)]
            logits, cap = (rows @ w.T).float().cpu(), op.attrs.get("softcap", 0.0)
            self._observed.states[LOGITS] = cap * (logits / cap).tanh() if cap else logits

    def _keep(self, name: str, value: Tensor, most: int | None = None) -> None:
        self._observed.states[name] = value[self._positions[:most].to(value.device)].float().cpu()


def _fill(subject: Subject, worker: AnyWorker, skipped: Sequence[str]) -> None:
    """Fill the weights as at the start of a run, except that an adapter's zero matrices are drawn.

    A matrix of zeros would make the gradients of the other matrix of its pair zero.
    """
    config, assembly = subject.run.config, subject.plan.assembly
    params = worker.params()
    if skipped and not config.from_scratch:
        initialize((v for v in assembly.allocated if v.init), worker.buffers.persistent, config.train_seed)
        load_base(subject.run, assembly, worker, skipped)
        load_adapter(subject.run, assembly, params)
    else:
        run.fill_weights(subject.run, assembly, worker)
    if subject.run.adapter is not None and config.adapter_path is None:
        draw_zeros(assembly.trainable, worker.buffers.persistent, _ADAPTER_STD, config.train_seed)


def _write(subject: Subject, worker: AnyWorker, scratch: Path) -> None:
    """Write what transformers cannot read from the user's files."""
    config, params = subject.run.config, worker.params()
    worker.settle()
    headed = subject.run.adapter is None and any(m.new for m in subject.plan.assembly.weights)
    if (config.from_scratch or headed) and not (scratch / "model").exists():
        pieces = {name: worker.pieces(value) for name, value in subject.plan.assembly.params.items()}
        hf.save_model(scratch / "model", model_export(subject.run, subject.plan, pieces))
    found = subject.run.adapter
    if found is not None and not (scratch / "adapter").exists():
        adapter, options = found
        (scratch / "adapter").mkdir()
        adapter.save(
            trained_tensors(subject.plan.assembly, params), scratch / "adapter", str(subject.run.model_dir), options
        )


def _gradients(assembly: Assembly, view: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return gradients by the names of the checkpoint's tensors or of the adapter's params."""
    trained = {v.name for v in assembly.trainable}
    values = {v.name.removeprefix("grad."): v for v in assembly.declared if v.name.startswith("grad.")}
    grads = {name: view(value).float().cpu().clone() for name, value in values.items() if name in trained}
    maps = {weight.param: weight.tensors for weight in assembly.weights}
    found: dict[str, Tensor] = {}
    for name, grad in grads.items():
        tensors = maps.get(name, (HFTensor(name, tuple(grad.shape)),))
        parts = grad.split([tensor.rows[0] for tensor in tensors])
        found |= {tensor.name: tensor.save(part) for tensor, part in zip(tensors, parts, strict=True)}
    return found
