"""Changes that a proposal may make, as keys of the config: micro-batch, recomputation, parts of ranks, offloading, ...

A change is a mapping of keys to values. It is applied by loading the config again, so a proposal is planned exactly as
if its lines were in the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from surogate_core.api import DeviceInfo, OptimizerDef, Precision
from surogate_core.assembly.step_inputs import divisors
from surogate_core.machine.devices import GIB
from surogate_core.memory.alignment import align
from surogate_core.planning.plan import Plan, settled
from surogate_core.planning.recompute_ladder import RecomputeLevel, ladder
from surogate_core.planning.report import step_runs
from surogate_core.program.value import Value

from ..config.keys import ADAPTER_FLAG
from ..config.load import load_config, resolved
from ..config.model_options import of_model
from ..config.schema import RECOMPUTE_KEYS, TrainConfig
from ..config.yaml import dump_yaml
from ..runs.run import Run, open_run

Changes = Mapping[str, Any]

ANY_ORDER: Changes = {"deterministic": False}
"""Sums of attention's backward pass in any order, which takes less workspace."""

LAST_RESORTS: Mapping[str, str] = {
    "deterministic": "gradients whose last bits may differ from run to run",
    "param_grad_dtype": "gradients or optimizer states in bf16",
    "optimizer_state_dtype": "gradients or optimizer states in bf16",
    "sequence_len": "shorter rows, the longest that fits",
    "quantize_lm_head": "also of embedding and LM head",
    ADAPTER_FLAG.key: "an adapter in place of all weights",
}
"""Keys whose change alters what a run learns -> what it gives up."""

WORTH = 0.02
"""Nothing is changed for values of less than this share of the device's memory."""
_SHORTEST = 256
"""Rows are not made shorter than this many tokens."""
_ROOM = 0.98
"""Share of the free memory that whole blocks may take."""
_MOST_WHOLE = 0.75
"""Of the blocks: those behind gain little, because the gathers after an update come in the order of use."""
_WORTH_A_PLAN = 0.01
"""A plan with more whole blocks is made if these may save this share of a step."""
ALIKE = 0.005
"""Steps whose times differ by less than this are equally fast: the fewer changes win."""
_OPTIMISTIC = 1.2
"""Of the longest rows that are tried, over the length that is estimated to fit."""
MOST_STEPS = 65536
"""The most micro-steps that `gradient_accumulation_steps` allows."""


@dataclass(frozen=True)
class Axis:
    """The settings of one thing about a run, ordered by the device memory that they leave free.

    own        index of the setting that the search starts from: the run's own, if it is among them
    transfers  whether each setting transfers more than the one before it: an offload strategy, or what ranks divide
    """

    settings: Sequence[Changes]
    own: int = 0
    transfers: bool = False


def changed(run: Run, changes: Changes) -> Run:
    """Return the run with other values for some keys. Raises ConfigError if the config forbids them."""
    loaded = run.loaded
    raw = {**resolved(loaded), **changes}
    again = load_config(raw, registry=run.registry, mode=loaded.mode, source=loaded.source)
    opened = {ADAPTER_FLAG.key, *(format.key for format in run.registry.weight_formats().values())}
    return open_run(again, run.registry) if opened & changes.keys() else replace(run, loaded=of_model(again, run.model))


def batch_axis(config: TrainConfig) -> Axis:
    """Return the micro-batches of the same optimizer step: the same rows in more and more micro-steps."""
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    sizes = [size for size in sorted(divisors(rows), reverse=True) if rows // size <= MOST_STEPS]
    changes = [batch_changes(config, size, config.sequence_len, rows // size) for size in sizes]
    return Axis(changes, sizes.index(config.per_device_train_batch_size))


def batch_changes(config: TrainConfig, rows: int, length: int, steps: int) -> Changes:
    """Return the keys of micro-steps of `rows` rows that differ from the config's."""
    chunks = config.lmhead_chunks
    while isinstance(chunks, int) and rows * length % chunks:
        chunks -= 1
    parts = config.attn_bwd_chunks
    while rows % parts:
        parts -= 1
    keys = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": steps,
        "sequence_len": length,
        "lmhead_chunks": chunks,
        "attn_bwd_chunks": parts,
    }
    return {key: value for key, value in keys.items() if value != getattr(config, key)}


def shorter_rows(config: TrainConfig) -> Iterator[Changes]:
    """Yield the keys of rows of half the length, a quarter, and so on, with the tokens of the step."""
    length, steps = config.sequence_len, config.gradient_accumulation_steps
    while length % 2 == 0 and length > _SHORTEST:
        length, steps = length // 2, steps * 2
        yield batch_changes(config, config.per_device_train_batch_size, length, steps)


def recompute_axis(run: Run, device: DeviceInfo) -> Axis:
    """Return the recomputation that the planner chooses; where it chooses none, on a CPU, none or all of it."""
    config = run.config
    if device.sm is None and config.device_memory_limit is None:
        return Axis([{}, {"recompute": True}] if config.recompute != "true" else [{}])
    word: Changes = {"recompute": "auto"} if config.recompute != "auto" else {}
    return Axis([{**word, **{key: False for key in RECOMPUTE_KEYS.values() if getattr(config, key)}}])


def divided_axes(run: Run, plan: Plan) -> Iterator[Axis]:
    """Yield an axis for what several ranks hold whole and could divide, or divide: gradients, and weights."""
    ranks, least = plan.inputs.world_size, WORTH * plan.target.device.memory_bytes
    now = plan.inputs.sharding
    for key, part, divided in (
        ("shard_gradients", "gradients", now.gradients),
        ("shard_weights", "weights", now.weights),
    ):
        if divided or plan.report.device_bytes[part] * (1 - 1 / ranks) >= least:
            settings: list[Changes] = [{key: False}, {key: True}]
            settings[divided] = {}
            if part == "weights" and now.whole_blocks:
                settings = [{key: False, "whole_blocks": 0}, {}, {"whole_blocks": 0}]
            yield Axis(settings, int(divided), transfers=True)


def with_level(config: TrainConfig, changes: Changes) -> Changes:
    """Return changes that say by the level of ZeRO what ranks divide, where there is one for that."""
    if changes.keys().isdisjoint(("shard_gradients", "shard_weights")):
        return changes
    wanted = config.model_copy(update=dict(changes)).sharding(ranks=2)
    level = 1 + wanted.gradients * (1 + wanted.weights)
    keys = {
        "zero_level": level,
        "shard_gradients": None,
        "shard_weights": True if wanted.weights and level == 1 else None,
    }
    others = {key: value for key, value in changes.items() if key not in keys}
    return {**{key: value for key, value in keys.items() if value != getattr(config, key)}, **others}


def whole_blocks(plan: Plan) -> Changes:
    """Return how many blocks can stay whole in the memory that a plan leaves free; {} if no more than do."""
    own = plan.inputs.sharding
    room = _ROOM * (plan.report.device.memory_bytes - plan.report.device_bytes["total"])
    count = bisect_right(list(accumulate(_added_by_whole_blocks(plan))), room)
    return {"whole_blocks": count} if own.weights and count > own.whole_blocks else {}


def _added_by_whole_blocks(plan: Plan) -> list[int]:
    """Return the bytes of the device that each block takes more if it is whole; 0 of a block that is."""
    own, added = plan.inputs.sharding, [0] * plan.inputs.dims.n_layers
    for value in plan.assembly.declared if own.weights else ():
        if value.block >= 0 and (value.role == "param" or value.derived) and value.shard and not value.inside:
            added[value.block] += (own.parts - 1) * align(value.nbytes) * plan.inputs.ranks_per_device
    return added


def worthwhile_whole_blocks(plan: Plan) -> Changes:
    """Return how many more blocks of a plan that fits may stay whole and make a step faster; {} if none do.

    They take what is free, and more where the recomputation that makes room for them costs less than their gathers, of
    which a block has at most its share of the time that collectives add to a step.
    """
    own, added, step = plan.inputs.sharding, _added_by_whole_blocks(plan), plan.report.step.seconds
    every = (step - plan.report.alone) * _spared(plan)  # seconds that blocks which are gathered add
    if not own.weights or _MOST_WHOLE * every < _WORTH_A_PLAN * step:
        return {}
    saved = every / (len(added) - own.whole_blocks)
    room, ranks = _ROOM * -plan.report.missing_bytes, plan.inputs.ranks_per_device
    levels = _levels_from(plan)
    gains, at = dict[int, float](), 0
    for count, needed in enumerate(accumulate(added[: int(_MOST_WHOLE * len(added))]), 1):
        while at < len(levels) and (levels[0].kept - levels[at].kept) * ranks < needed - room:
            at += 1
        if at == len(levels):
            break
        gains[count] = saved * (count - own.whole_blocks) - (levels[at].seconds - levels[0].seconds) * ranks
    count = max(gains, key=gains.__getitem__, default=0)
    return {"whole_blocks": count} if count and gains[count] >= _WORTH_A_PLAN * step else {}


def _spared(plan: Plan) -> float:
    """Return the share of what ranks send in a step that they do not if all blocks are whole.

    Weights that are trained are still gathered once, after the update.
    """
    spared, once, trained = 0, dict[Sequence[Value], int](), plan.assembly.n_trainable == plan.assembly.n_params
    for program, count in step_runs(plan.assembly, plan.inputs).items():
        for op in program.ops if program.stage == "micro" else ():
            if op.block >= 0 and op.kind in ("all_gather", "broadcast"):
                once[op.ins] = plan.inputs.ops[op.kind].link(op)
                spared += once[op.ins] * count
    return (spared - trained * sum(once.values())) / max(1, plan.report.sent)


def _levels_from(plan: Plan) -> Sequence[RecomputeLevel]:
    """Return the recomputation of a plan, and each level that keeps less."""
    levels = ladder(plan.recording, plan.inputs)
    chosen = plan.chosen.recomputation if plan.chosen else levels[0].recomputation
    own = next((index for index, level in enumerate(levels) if level.recomputation == chosen), len(levels) - 1)
    return levels[own:] if plan.inputs.recompute_more else levels[own : own + 1]


def offload_axes(run: Run) -> Iterator[Axis]:
    """Yield an axis for each strategy that the run selects or an installed package proposes.

    Those that keep more values, not to compute them again, come last: they take memory of the host alone.
    """
    strategies = ((name, run.registry.offload(name)) for name in run.registry.names("offload"))
    for name, strategy in sorted(strategies, key=lambda one: (bool(one[1].keeps), one[0])):
        options = run.loaded.options["offload", name]
        now, defaults = (values.model_dump(mode="json", by_alias=True) for values in (options, strategy.options()))
        off = {key: defaults[key] for proposed in strategy.proposed for key in proposed}
        every = [
            {key: value for key, value in wanted.items() if (now[key], type(now[key])) != (value, type(value))}
            for wanted in (off, *strategy.proposed)
        ]
        if strategy.proposed:
            own = every.index({}) if {} in every else 1
            yield Axis(every if {} in every else [every[0], {}, *every[1:]], own, transfers=True)


def narrower(precision: Precision, optimizer: OptimizerDef) -> Changes:
    """Return the dtype keys that make gradients and optimizer states smaller."""
    names = ("param_grad", "optimizer_state") if "bf16" in optimizer.state_dtypes else ("param_grad",)
    return {f"{name}_dtype": "bf16" for name in names if getattr(precision, name) == "fp32"}


def resorts(run: Run, plan: Plan, best: Plan) -> Iterator[Changes]:
    """Yield changes of what a run computes, from the least to the most: narrower dtypes, an adapter, a rounded base of
    the most bits first.

    `best`: with all other changes. If it does not fit, nothing is won by what the host holds.
    """
    dtypes = narrower(plan.inputs.precision, plan.inputs.optimizer)
    parts = (best.report.device_bytes, best.report.host_bytes)[: 1 + best.report.fits]
    trained = sum(part.get(key, 0) for part in parts for key in ("gradients", "optimizer"))
    adapter: Changes = {} if run.config.adapter else {ADAPTER_FLAG.key: True}
    if dtypes and trained / 2 >= WORTH * plan.target.device.memory_bytes:
        yield dtypes
    if adapter:
        yield adapter
    yield from ({**adapter, key: True} for key in _formats(run, plan))


def resorts_if_nothing_fits(run: Run, plan: Plan) -> Iterator[Changes]:
    """Yield the changes that give up much: a base that is rounded as a whole."""
    adapter: Changes = {} if run.config.adapter else {ADAPTER_FLAG.key: True}
    whole = {"quantize_lm_head": True, "quantize_embedding": True}
    if run.weight_format:
        yield whole
    yield from ({**adapter, key: True, **whole} for key in _formats(run, plan)[-1:])


def longest_that_may_fit(tried: Plan) -> float:
    """Return the length of rows, in tokens, that may fit by a plan that does not.

    Weights, gradients and states are taken from that plan, and the rest is taken to grow with the rows.
    """
    parts, room = tried.report.device_bytes, tried.report.device.memory_bytes
    fixed = sum(parts[name] for name in ("weights", "gradients", "optimizer", "runtime"))
    return _OPTIMISTIC * tried.inputs.seq_len * (room - fixed) / max(1, parts["total"] - fixed)


def gives_up_less(run: Run, less: Changes, resort: Changes) -> bool:
    """Return whether a last resort that was tried before another gives up nothing that this one keeps. Formats are
    tried from the most bits on."""
    formats = {format.key for format in run.registry.weight_formats().values()}
    kinds = [{"format" if key in formats else key for key in changes} for changes in (less, resort)]
    return kinds[0] <= kinds[1]


def smallest_formats(run: Run, device: DeviceInfo) -> Mapping[int, str]:
    """Return {bits: key} of the weight formats that a device supports, of the most bits first: of formats of about as
    many bits the smallest."""
    formats = (f for f in run.registry.weight_formats().values() if f.bits is not None)
    serving = (f for f in formats if f.supports(device, f.options()).ok)
    return {round(f.bits or 0): f.key for f in sorted(serving, key=lambda f: -(f.bits or 0))}


def _formats(run: Run, plan: Plan) -> list[str]:
    """Return the keys of `smallest_formats`; none if the run has a format."""
    return [] if run.weight_format else list(smallest_formats(run, plan.target.device).values())


def given_up(run: Run, changes: Changes) -> str:
    """Return what a run gives up by changes of what it computes; "" if they keep it."""
    formats = {f.key: f"a base of {round(f.bits or 0)} bits" for f in run.registry.weight_formats().values()}
    names = {**LAST_RESORTS, **formats}
    return ", ".join(dict.fromkeys(names[key] for key in changes if key in names))


@dataclass(frozen=True)
class Proposal:
    """Changes of the config to make together, and the plan of the run with them. A step keeps its tokens.

    The plan of a search is a sketch until it is `finished`: its seconds and missing bytes are estimates.

    resort  what the run gives up, if the changes are a last resort; "" if they keep what it learns
    """

    changes: Changes
    plan: Plan
    resort: str = ""

    @property
    def fits(self) -> bool:
        return self.plan.report.fits

    @property
    def lines(self) -> list[str]:
        """The changes as lines of YAML."""
        return dump_yaml(self.changes).splitlines() if self.changes else []

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if it does not fit."""
        return self.plan.expected.seconds

    @property
    def missing(self) -> int:
        """Bytes of the device and the host that do not fit."""
        report, levels = self.plan.report, self.plan.recompute_levels
        freed = (levels[0].kept - levels[-1].kept) * self.plan.inputs.ranks_per_device if levels else 0
        return max(0, report.missing_bytes - freed) + report.missing_host_bytes

    def finished(self) -> Proposal:
        """Return the proposal with the recomputation that its plan needs."""
        return replace(self, plan=settled(self.plan))

    def saves(self, before: Plan) -> int:
        """Return by how many bytes a device needs less than in the plan `before`."""
        return before.report.device_bytes["total"] - self.plan.report.device_bytes["total"]

    def costs(self, before: Plan) -> float:
        """Return the time that is added to a step, over the time of a step in the plan `before`."""
        after, step = self.plan.report, before.report.step.seconds
        return after.step.seconds * before.report.tokens / after.tokens / step - 1


def one_line(proposal: Proposal, before: Plan) -> str:
    """Return a proposal as part of a sentence: `a: true, b: 1 (saves 5.1 GiB)`."""
    saved, missing = proposal.saves(before), proposal.plan.report.missing_bytes
    effect = (
        f"saves {saved / GIB:.1f} GiB" if before.report.missing_bytes > 0 else f"{proposal.costs(before):+.0%} time"
    )
    rest = f", {missing / GIB:.1f} GiB still missing" if missing > 0 else ""
    return f"{', '.join(proposal.lines)} ({effect}{rest})"
