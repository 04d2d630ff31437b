"""A planned model (by default a small Qwen3) that runs on the GPU and, with the same plan, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from surogate_core.api import Comm, Deterministic, NoOptions, OffloadDef, Precision, PrecisionRequest, Target
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.assembly.recomputed import Recomputation
from surogate_core.assembly.streaming import ZeroCopy
from surogate_core.batch import MicroBatch
from surogate_core.plugins.discovery import load_registry
from surogate_core.program.op import Op
from surogate_core.runtime.bind import ExecutionContext
from surogate_core.runtime.device import training_device
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker
from surogate_core.standard_ops.next_token import LOSSES

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.05,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA4 = {"type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SMALL,
    "qwen2": SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": SMALL
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 64},
    },
    "llama with yarn and biases": SMALL
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    },
    "ministral3": SMALL
    | {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_scaling": _LLAMA4 | {"original_max_position_embeddings": 16},
    },
    "qwen3 with yarn": SMALL
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
}
"""Small models of every family. Together they use every op, bias and scaling of RoPE and of queries."""


class Setup:
    """An assembly, from which a test creates workers.

    `adapter` are the options of a LoRA adapter; with None all params are trained. `options` are those of the recipe.
    """

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *,
        batch_size: int = 2,
        seq_len: int = 128,
        max_documents: int = 8,
        recompute: frozenset[str] = frozenset(),
        recompute_chosen: Recomputation | None = None,
        lmhead_chunks: int | None = None,
        unlabelled: float = 0.1,
        deterministic: Deterministic = "auto",
        adapter: Mapping[str, Any] | None = None,
        recipe: str = "bf16",
        options: Mapping[str, Any] | None = None,
        numerics: bool = False,
        offload: Sequence[str] = (),
        attn_bwd_chunks: int = 1,
        row_tiles: int = 0,
        zero_copy: ZeroCopy = False,
        optimizer: str = "adamw",
        **dtypes: str,
    ) -> None:
        self.registry = load_registry()
        self.target = Target(training_device(), deterministic)
        self.notices: list[str] = []
        self.config = config or SMALL
        self.unlabelled = unlabelled
        chosen, rule = self.registry.recipe(recipe), self.registry.optimizer(optimizer)
        model = self.registry.model_for(self.config)
        lora = self.registry.adapter("lora")
        recipe_options = chosen.options(**(options or {}))
        self.precision: Precision = chosen.precision(PrecisionRequest(**dtypes), recipe_options)
        self.given = PlanInputs(
            ops=self.registry.ops,
            model=model,
            dims=model.dims(self.config),
            loss=LOSSES[0],
            loss_options=NoOptions(),
            recipe=chosen,
            recipe_options=recipe_options,
            optimizer=rule,
            optimizer_options=rule.options(),
            precision=self.precision,
            batch_size=batch_size,
            seq_len=seq_len,
            max_documents=max_documents,
            lmhead_chunks=lmhead_chunks,
            weight_decay=0.1,
            max_grad_norm=1.0,
            recompute=recompute,
            numerics=numerics,
            offload=[self._strategy(name) for name in offload],
            attn_bwd_chunks=attn_bwd_chunks,
            row_tiles=row_tiles,
            zero_copy=zero_copy,
            recompute_chosen=recompute_chosen,
            adapters=() if adapter is None else [(lora, lora.options(**adapter))],
            target=self.target,
            kernel_for=lambda op: self.registry.kernel_for(op, self.target, recipe),
        )
        self.assembly: Assembly = assemble(self.given)

    def _strategy(self, name: str) -> tuple[OffloadDef, BaseModel]:
        strategy = self.registry.offload(name)
        return strategy, strategy.options.model_validate({f"offload_{name}": True})

    def _kernel(self, op: Op) -> Any:
        return self.assembly.kernels.kernel(op)

    def missing_kernels(self) -> set[str]:
        """Return the ops for which no kernel is supported, with the reasons."""
        found = set()
        for program in self.assembly.programs.values():
            for op in program.ops:
                resolved = self.assembly.kernels[op]
                if resolved.kernel is None:
                    found.add(f"{op.kind}{[v.dtype for v in (*op.ins, *op.outs)][:8]}: {resolved.refusals}")
        return found

    def context(self) -> ExecutionContext:
        return ExecutionContext(
            ops=self.registry.ops, kernel_for=self._kernel, target=self.target, notice=self.notices.append
        )

    def gpu(
        self,
        *,
        graphs: bool = True,
        allow_reference: bool = False,
        poison: bool = True,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> Worker:
        """Return a GPU worker with random weights, or with `weights` by checkpoint tensor name."""
        context = replace(self.context(), allow_reference=allow_reference)
        worker = Worker.on_gpu(self.assembly, context, 1, poison=poison)
        self.fill(worker, weights)
        worker.start(graphs=graphs)
        return worker

    def cpu(self, *, weights: Mapping[str, torch.Tensor] | None = None) -> Worker:
        worker = Worker.on_cpu(self.assembly, self.registry.ops, 1)
        self.fill(worker, weights)
        worker.start()
        return worker

    def fill(self, worker: Worker | Team, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        initialize((v for v in self.assembly.allocated if v.init), worker.buffers.persistent, 7)
        for part in self.assembly.staging:
            views = worker.staged(part)
            initialize(part.places, lambda v: views[v.name], 7)  # noqa: B023 (called at once)
            worker.derive(part)
        if weights is not None:
            params = worker.params()
            for weight in self.assembly.weights:
                params[weight.param].copy_(torch.cat([weights[t.name] for t in weight.tensors]))

    def batch(self, seed: int, *, more: int | None = None) -> MicroBatch:
        """Return random tokens in random documents. A fraction `unlabelled` of the tokens has no label.

        more: at most this many documents more than rows; None: as many as the programs allow; 0: full rows.
        """
        rng = np.random.default_rng(seed)
        batch, total = self.given, self.given.batch_size * self.given.seq_len
        tokens = rng.integers(0, self.config["vocab_size"], total, dtype=np.int32)
        starts = {row * batch.seq_len for row in range(batch.batch_size)}
        spare = batch.max_documents - batch.batch_size
        starts |= set(rng.integers(1, total, spare if more is None else more).tolist())
        offsets = np.array(sorted(starts), np.int32)
        cu_seqlens = np.full(batch.max_documents + 1, total, np.int32)
        cu_seqlens[: len(offsets)] = offsets
        lengths = np.diff(np.append(offsets, total))
        positions = np.arange(total) - np.repeat(offsets, lengths)
        targets = np.roll(tokens, -1)
        targets[np.append(offsets[1:], total) - 1] = -100
        targets[rng.random(total) < self.unlabelled] = -100
        return MicroBatch(
            tokens, targets.astype(np.int32), positions.astype(np.int32), cu_seqlens, total, int((targets >= 0).sum())
        )

    def step(
        self,
        worker: Worker,
        seed: int,
        *,
        micro: int = 2,
        step: int = 1,
        lr: float = 1e-3,
        reporting: bool = False,
    ) -> tuple[float, float]:
        """Run an optimizer step over `micro` batches. Return (loss, norm)."""
        batches = [self.batch(100 * seed + i) for i in range(micro)]
        scale = 1 / sum(b.n_valid for b in batches)
        for i, batch in enumerate(batches):
            first = i == 0
            worker.micro_step(
                batch, first=first, loss_scale=scale, index=step * micro + i, reporting=reporting and first
            )
        return worker.update(lr=lr, step=step).values()

    def gradients(self, worker: Worker) -> dict[str, torch.Tensor]:
        worker.settle()
        return {v.name: worker.buffers.persistent(v).float().cpu() for v in self.assembly.declared if v.role == "grad"}

    def weights(self, worker: Worker) -> dict[str, torch.Tensor]:
        worker.settle()
        return {name: value.clone().cpu() for name, value in worker.params().items()}


@contextmanager
def team_of(setup: Setup, comms: Sequence[Comm], *, graphs: bool = True) -> Iterator[Team]:
    """Start a worker for each communicator, with the weights of the first."""

    def make(comm: Comm) -> Worker:
        return Worker.on_gpu(setup.assembly, replace(setup.context(), comm=comm), 1, poison=True)

    team = Team(comms, make)
    try:
        setup.fill(team)
        team.start(graphs=graphs)
        yield team
    finally:
        team.close()


def step(setup: Setup, worker: Worker | Team, number: int, micro: int) -> tuple[float, float]:
    """Run an optimizer step over `micro` batches. The worker takes `width` of them at a time."""
    batches = [setup.batch(100 * number + i) for i in range(micro)]
    scale = 1 / sum(batch.n_valid for batch in batches)
    for at in range(0, micro, worker.width):
        worker.micro_step(
            *batches[at : at + worker.width],
            first=at == 0,
            last=at + worker.width == micro,
            loss_scale=scale,
            index=number * micro + at,
        )
    return worker.update(lr=1e-3, step=number).values()
