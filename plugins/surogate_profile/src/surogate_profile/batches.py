"""The batches and weights of a profile: those of the run, or random ones. The profile never changes the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from surogate import run
from surogate.config.schema import TrainConfig
from surogate.data.corpora import Corpora
from surogate.data.loader import Loader
from surogate.runs.run import Run
from surogate_core.assembly.assembly import Assembly
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.batch import NO_LABEL, MicroBatch, StepBatch
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from surogate_core.runtime.worker import Worker

ADAPTER_STD = 0.01
STAGED_STD = 0.02


@dataclass(frozen=True)
class Batches:
    """One batch for each step. source: where the tokens come from, in words."""

    steps: tuple[StepBatch, ...]
    source: str

    @property
    def tokens_per_step(self) -> float:
        """Mean positions of a step, padding excluded."""
        return sum(batch.tokens for batch in self.steps) / len(self.steps)


def from_data(data: Corpora, config: TrainConfig, count: int) -> Batches:
    """Return the batches of the first `count` steps of the run."""
    micro_steps = config.gradient_accumulation_steps
    rows = config.per_device_train_batch_size
    loader = Loader(data.train, rows, micro_steps, config.train_seed, data.tokenizer.padding_id)
    steps = tuple(loader.step(index) for index in range(count))
    return Batches(
        steps, f"{micro_steps} x {rows} x {config.sequence_len} of the run's data, {_labels(steps):.0%} with a label"
    )


def random_tokens(inputs: PlanInputs, count: int) -> Batches:
    """Return `count` steps of random tokens, also for a prepass: one document a row, or one group of documents if the
    loss compares them; labels for all but their ends."""
    micro_steps, documents = inputs.grad_accum_steps, max(1, inputs.loss.group_size)
    steps = []
    for index in range(count):
        first = index * micro_steps
        micro = [random_batch(inputs, documents, seed=first + i) for i in range(micro_steps)]
        micro = [replace(batch, before=batch) for batch in micro] if inputs.loss.prepass else micro
        steps.append(step_of(micro))
    shape = f"{micro_steps} x {inputs.batch_size} x {inputs.seq_len} random tokens"
    return Batches(tuple(steps), f"{shape}, {'one document' if documents == 1 else f'{documents} documents'} a row")


def step_of(micro: list[MicroBatch]) -> StepBatch:
    """Return the optimizer step of these micro-batches."""
    tokens, labels, groups = (sum(getattr(b, name) for b in micro) for name in ("n_tokens", "n_valid", "n_groups"))
    return StepBatch(micro, tokens, labels, epoch=0.0, groups=groups)


def random_batch(inputs: PlanInputs, documents: int = 1, labelled: float = 1.0, seed: int = 1) -> MicroBatch:
    """Return a micro-batch of random tokens.

    documents: of equal length in each row; must divide the row's length. Those of a group follow each other, if the
    loss compares them, and there must be whole groups. labelled: share of each document's tokens that have a label,
    from its first token on.
    """
    total, length = inputs.tokens, inputs.seq_len // documents
    tokens = np.random.default_rng(seed).integers(0, inputs.dims.vocab_size, total, dtype=np.int32)
    starts = np.arange(0, total, length, dtype=np.int32)
    offsets = np.full(inputs.max_documents + 1, total, np.int32)
    offsets[: len(starts)] = starts
    positions = np.tile(np.arange(length, dtype=np.int32), len(starts))
    targets = np.where(positions < min(labelled * length, length - 1), np.roll(tokens, -1), NO_LABEL).astype(np.int32)
    batch = MicroBatch(tokens, targets, positions, offsets, total, int((targets >= 0).sum()))
    group = inputs.loss.group_size
    if not group:
        return batch
    if len(starts) % group:
        raise ConfigError(
            f"{len(starts)} documents in a micro-batch: loss {inputs.loss.name} compares {group} at a time. Use a "
            "multiple of that."
        )
    spans = np.zeros(((inputs.max_documents - inputs.batch_size) // group, group, 2), np.int32)
    spans[: len(starts) // group] = np.stack([starts, starts + length], -1).reshape(-1, group, 2)
    return replace(batch, n_groups=len(starts) // group, asked={"groups": spans})


def _labels(steps: tuple[StepBatch, ...]) -> float:
    """Share of the positions, padding included, that have a label."""
    positions = sum(len(micro.tokens) for batch in steps for micro in batch.micro)
    return sum(batch.valid_tokens for batch in steps) / positions


def fill(opened: Run, assembly: Assembly, worker: Worker, *, random: bool) -> None:
    """Fill params and states. With `random`, draw all params and read no checkpoint.

    Adapter matrices that start at zero are drawn: they are zero in a run's first step only, and a GPU multiplies zeros
    faster than other numbers, because it needs less power.
    """
    from surogate_core.runtime.initialize import draw_zeros, initialize

    config = opened.config
    view = worker.buffers.persistent
    if random:
        initialize((v for v in assembly.allocated if v.init), view, config.train_seed)
        for part in assembly.staging:
            for view_of_staged in worker.staged(part).values():
                view_of_staged.normal_(std=STAGED_STD)  # on the device, because a host takes minutes for 70B
            worker.derive(part)
    else:
        run.fill_weights(opened, assembly, worker)
    if opened.adapter is not None and config.adapter_path is None:
        draw_zeros(assembly.trainable, view, ADAPTER_STD, config.train_seed)
