"""The share of a GPU's copy rate at which the kernels of a plugin move their bytes, in steps of runs of usual sizes.

A kernel is timed where it stands in a captured step, as `surogate profile` does it; one that no run selects, by itself
on the examples of its op. Nothing here fails a plugin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from surogate import run
from surogate_core.api import DeviceInfo, KernelDef, Op, Target
from surogate_core.assembly.resolve import KernelTable
from surogate_core.errors import SurogateError
from surogate_core.memory.cost import Cost, op_cost
from surogate_core.plugins.registry import refusal
from surogate_core.words import fold
from surogate_models.api import TINY_CONFIG
from surogate_profile.profiling import profile
from surogate_profile.step_profile import StepProfile

from .bench import Bench, Sample

SIZES: Mapping[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
"""Sizes of models in place of those of `TINY_CONFIG`. An example of the plugin that sets one of its own keeps it."""

RUN: Mapping[str, Any] = {"sequence_len": 2048, "per_device_train_batch_size": 4}
STEPS = 3
COPIED = 1 << 30


@dataclass(frozen=True)
class Share:
    """The rate at which a kernel moved its bytes: in the op with the most of them that it ran.

    kernel      kind of op, with a number if the plugin has several for it
    dtypes      of the op's inputs and outputs
    bytes       that a call reads and writes
    seconds     of a call, the mean
    share       of the copy rate
    arithmetic  whether the plan expects its arithmetic to take longer than its traffic
    """

    kernel: str
    dtypes: tuple[str, ...]
    bytes: int
    seconds: float
    share: float
    arithmetic: bool


@dataclass(frozen=True)
class Timed:
    """An op, its work, and the seconds of a call."""

    op: Op
    cost: Cost
    seconds: float


class Card(Protocol):
    """A GPU. copy_rate: bytes/s that a copy in its memory reads and writes together."""

    @property
    def device(self) -> DeviceInfo: ...

    @property
    def copy_rate(self) -> float: ...

    def profile(self, config: Path) -> StepProfile:
        """Time the steps of a run op by op, on random tokens and weights."""

    def seconds(self, kernel: KernelDef, sample: Sample) -> float:
        """Time a kernel by itself, again and again on the same inputs."""


class VisibleCard:
    """The first GPU that this process sees."""

    @cached_property
    def device(self) -> DeviceInfo:
        from surogate_core.runtime.device import training_device

        return training_device()

    @cached_property
    def copy_rate(self) -> float:
        import torch

        from surogate_core.runtime.device_rates import gpu_clock

        source, target = (torch.zeros(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
        return 2 * COPIED / gpu_clock(lambda: target.copy_(source), 0.0, 0.5)

    def profile(self, config: Path) -> StepProfile:
        return profile(config, steps=STEPS, use_random_tokens=True, use_random_weights=True, notice=lambda line: None)

    def seconds(self, kernel: KernelDef, sample: Sample) -> float:
        import torch

        from surogate_core.runtime.device_rates import gpu_clock
        from surogate_core.testing.binding import bind_kernel

        contents = dict(zip(sample.op.ins, sample.ins, strict=True))
        binding, stream = bind_kernel([kernel], sample.op, contents), torch.cuda.current_stream().cuda_stream
        return gpu_clock(lambda: binding.launch(stream), 0.0, 0.2)


def visible_card() -> Card | None:
    """Return the GPU to measure on, or None without one."""
    import torch

    return VisibleCard() if torch.cuda.is_available() else None


def shares(bench: Bench, card: Card) -> list[Share]:
    """Return the share of each kernel of the subject for which runs or examples have an op, in their order."""
    kernels = [item.definition for item in bench.subject.provided if item.kind == "kernel"]
    found: dict[int, Timed] = {}
    for keys in _runs(bench) if kernels else ():
        with suppress(SurogateError):  # a run that the card, or another definition, refuses
            _measure(bench, card, keys, found)
    for kernel in kernels:
        if id(kernel) not in found and kernel.op in bench.registry.ops:
            _measure_examples(bench, card, kernel, found)
    return [_share(label, found[key], card.copy_rate) for key, label in _labels(bench) if key in found]


def unmeasured(bench: Bench, measured: list[Share]) -> list[str]:
    """Return the kernels of the subject that `shares` had no op for."""
    known = {share.kernel for share in measured}
    return [label for _, label in _labels(bench) if label not in known]


def _labels(bench: Bench) -> Iterator[tuple[int, str]]:
    """Yield identity and label of each kernel, as `cases` counts them."""
    seen: dict[str, int] = {}
    for item in bench.subject.provided:
        if item.kind == "kernel":
            seen[item.name] = seen.get(item.name, 0) + 1
            yield id(item.definition), item.name + (f" ({seen[item.name]})" if seen[item.name] > 1 else "")


def _runs(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the keys of the subject's runs, with models of usual sizes. Outer models run the kernels of their text."""
    for own in bench.own_runs():
        if own.get("from_scratch") is False and "adapter" not in own:
            continue
        tiny = json.loads((Path(own.get("model") or bench.model_dir()) / "config.json").read_text())
        config = {k: SIZES[k] if k in SIZES and v == TINY_CONFIG.get(k) else v for k, v in tiny.items()}
        dtype = {} if "model_dtype" in own else {"model_dtype": "bf16"}
        yield {**RUN, **dtype, **own, "model": str(bench.model_dir(config))}


def _measure(bench: Bench, card: Card, keys: Mapping[str, Any], found: dict[int, Timed]) -> None:
    """Add what a run shows of the subject's kernels to `found`: the ops of each kernel with the most bytes."""
    kernels = _planned(bench, card, keys)
    wanted = {kind: name for kind, others in kernels.others.items() for name in others if _is_own(bench, name)}
    if wanted:
        keys = {**keys, "kernels": wanted}
        kernels = _planned(bench, card, keys)
    if not any(_is_own(bench, provider) for provider in kernels.providers.values()):
        return
    for group in card.profile(bench.config(keys, bench.folder / "none")).alike():
        served = kernels.by_signature.get(group.ops[0].op.signature)
        if served and served[1].kernel is not None and _is_own(bench, served[1].provider):
            _keep(found, served[1].kernel, Timed(group.ops[0].op, group.ops[0].cost, group.seconds / group.calls))


def _measure_examples(bench: Bench, card: Card, kernel: KernelDef, found: dict[int, Timed]) -> None:
    """Time the kernel on the examples of its op that it serves."""
    from .kinds.ops import examples

    definition = bench.registry.ops[kernel.op]
    for sample in examples(definition, bench):
        if not refusal(kernel, definition, sample.op, Target(card.device)):
            cost = op_cost(sample.op, definition, card.device, kernel)
            _keep(found, kernel, Timed(sample.op, cost, card.seconds(kernel, sample)))


def _keep(found: dict[int, Timed], kernel: KernelDef, timed: Timed) -> None:
    """Keep the op of a kernel with the most bytes."""
    if id(kernel) not in found or timed.cost.bytes > found[id(kernel)].cost.bytes:
        found[id(kernel)] = timed


def _planned(bench: Bench, card: Card, keys: Mapping[str, Any]) -> KernelTable:
    return run.plan(run.load(bench.config(keys, bench.folder / "none")), card.device, 1).kernels


def _is_own(bench: Bench, distribution: str) -> bool:
    return fold(distribution) == fold(bench.subject.name)


def _share(label: str, timed: Timed, copy_rate: float) -> Share:
    cost, dtypes = timed.cost, tuple(v.dtype for v in (*timed.op.ins, *timed.op.outs))
    rate = cost.bytes / timed.seconds if timed.seconds else 0.0
    arithmetic = cost.product_seconds + cost.attention_seconds > 0
    return Share(label, dtypes, cost.bytes, timed.seconds, rate / copy_rate, arithmetic)
