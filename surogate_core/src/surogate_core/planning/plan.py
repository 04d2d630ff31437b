"""From a run to its plan: the programs, the memory and the time that they take on a device. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from pydantic import BaseModel

from ..api import AdapterDef, DeviceInfo, LoweringDef, OffloadDef, Precision, RecipeDef, Target
from ..assembly.assemble import record, sketch
from ..assembly.assembly import Assembly
from ..assembly.draft import Draft
from ..assembly.inputs import PlanInputs
from ..assembly.passes.store import STORED_BY
from ..assembly.recomputed import ChosenRecomputation, Recomputation
from ..assembly.resolve import KernelTable
from ..config.keys import DISTRIBUTIONS
from ..config.rope_scaling import with_rope_scaling
from ..config.schema import DTYPE_KEYS
from ..data.pieces import documents_in_row
from ..errors import ConfigError
from ..machine.devices import limited
from ..memory.cost import OpCosts, program_cost
from ..plugins.registry import Registry
from ..program.shards import Sharding
from ..words import fold
from .ranks import count_ranks
from .recompute_ladder import RecomputeLevel, first_that_fits, ladder
from .report import Report, at_least, device_parts, summarise
from .run import Run, chosen_loss
from .unstored import refuse_unstored

Revise = Callable[[PlanInputs], PlanInputs]

_CERTAIN = 0.9
"""Of the bytes that recomputation can free: near its end, recomputed values and copies take what it frees."""


class Expected(NamedTuple):
    """The seconds of a step with recomputation, which adds a share to those without it; infinite if the plan does not
    fit. A sketch's is an estimate: not `certain` to fit if it needs most of what can be freed."""

    seconds: float
    share: float = inf
    certain: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run planned for a device: its programs, the kernels that run them, and the report of memory and time.

    overridden  lines for the user about keys without effect, and dtypes that the recipe does not use
    chosen      what is recomputed because of `recompute: auto`; None: nothing
    recompute_levels  of a sketch that does not fit: the recomputation to choose from (`recomputed`)
    recording   what other plans of the run can be made from (`sketch_run`)
    """

    inputs: PlanInputs = field(repr=False)  # its text, with all programs, has megabytes
    target: Target = field(repr=False)
    assembly: Assembly = field(repr=False)
    report: Report
    recording: Draft = field(repr=False)
    overridden: tuple[str, ...] = ()
    chosen: ChosenRecomputation | None = None
    recompute_levels: Sequence[RecomputeLevel] = field(default=(), repr=False)

    @property
    def kernels(self) -> KernelTable:
        return self.assembly.kernels

    @property
    def expected(self) -> Expected:
        step, ranks = self.report.step.seconds, self.inputs.ranks_per_device
        if not self.recompute_levels:
            share = self.chosen.costs / self.chosen.step if self.chosen else 0.0
            return Expected(step if self.report.fits else inf, share)
        kept, missing = self.recompute_levels[0].kept, -(-self.report.missing_bytes // ranks)
        for level in self.recompute_levels:
            if kept - level.kept >= missing:
                added, most = level.seconds * ranks, kept - self.recompute_levels[-1].kept
                return Expected(step + added, added / step, missing <= _CERTAIN * most)
        return Expected(inf)

    def eval_seconds(self, rows: int) -> float:
        """Return the planned time of an evaluation of `rows` rows, which a prepass reads too."""
        batches = -(-rows // (self.inputs.batch_size * self.report.devices)) * (2 if self.inputs.loss.prepass else 1)
        costs = OpCosts(self.inputs.ops, self.report.device, self.kernels.kernel)
        return batches * program_cost(self.assembly.only("evaluate"), costs).seconds

    def verify(self) -> None:
        """Run the last checks of a plan. Raises ProgramError."""
        self.assembly.passed.verify()


def plan_run(
    run: Run,
    device: DeviceInfo,
    world_size: int | None = None,
    revise: Revise = lambda inputs: inputs,
    host_memory: int | None = None,
    nodes: int = 1,
) -> Plan:
    """Plan `run` for `world_size` ranks on devices like `device`, on `nodes` machines; None: as its keys ask.

    The device has no more memory than `device_memory_limit`. `host_memory` is what the run may pin on each machine,
    unless `host_memory_limit` sets it. `revise` changes the inputs before they are planned. Raises ConfigError or
    PluginError if config, model, recipe and device do not fit together.
    """
    plan = recomputed(sketch_run(run, device, world_size, revise, host_memory, nodes=nodes))
    plan.verify()
    return replace(plan, overridden=tuple(_remarks(run, plan)))


def sketch_run(
    run: Run,
    device: DeviceInfo,
    world_size: int | None = None,
    revise: Revise = lambda inputs: inputs,
    host_memory: int | None = None,
    recording: Draft | None = None,
    nodes: int = 1,
) -> Plan:
    """Return the plan of `plan_run` without its last checks (`Plan.verify`) and without the recomputation that the
    planner chooses. `Plan.expected` says what that would make of it, and `recomputed` makes it. The report of a sketch
    that does not fit may count only live bytes (`at_least`).

    `recording`: of a plan that this one can be made from (`assemble.record`).
    """
    device = limited(device, run.config.device_memory_limit)
    ranks = count_ranks(run.config, device, None, nodes) if world_size is None else world_size
    given = run_inputs(run, device, ranks, nodes)
    inputs = revise(replace(given, host_memory=run.config.host_memory_limit or host_memory))
    plan = sketch_exactly(replace(inputs, recompute_chosen=None), recording)
    refuse_unstored(run, plan.assembly)
    with plan.assembly.passed.finding_causes():
        levels = ladder(plan.recording, inputs) if plan.report.missing_bytes > 0 and inputs.recompute_more else ()
    return replace(plan, recompute_levels=levels if len(levels) > 1 else ())


def recomputed(plan: Plan) -> Plan:
    """Return a sketch with more recomputation if it does not fit: the cheapest that fits, or all of it if nothing does.

    A plan that recomputation does not make smaller keeps its own. The report's bytes are exact.
    """
    if plan.report.missing_bytes <= 0:
        return plan
    with plan.assembly.passed.finding_causes():
        exact = replace(plan, report=summarise(plan.assembly, plan.inputs))
        return _recomputing(exact) if plan.recompute_levels else exact


def _recomputing(plan: Plan) -> Plan:
    expected, inputs, levels = plan.expected, plan.inputs, plan.recompute_levels
    plan = replace(plan, recompute_levels=())
    missing = -(-plan.report.missing_bytes // inputs.ranks_per_device)
    sketches: dict[int, tuple[PlanInputs, Assembly]] = {}

    def missing_at(index: int) -> int:
        """Return by how many bytes the device has too little for each of its ranks."""
        if index not in sketches:
            given = replace(inputs, recompute_chosen=levels[index].recomputation)
            sketches[index] = given, sketch(given, plan.recording)
        given, assembly = sketches[index]
        memory = assembly.memory
        needed = sum(device_parts(memory, given, at_least(memory, given)).values())
        return -(-(needed - plan.target.device.memory_bytes) // inputs.ranks_per_device)

    last = len(levels) - 1
    searches = (expected.certain and expected.seconds < inf) or missing_at(last) <= 0
    index = first_that_fits(levels, missing, missing_at) if searches else last
    given, assembly = sketches[index]
    after = replace(plan, inputs=given, assembly=assembly, report=summarise(assembly, given))
    chosen = _chosen(levels[index].recomputation, plan, after)
    return replace(after, chosen=chosen) if chosen.saves > 0 else plan


def _chosen(recomputation: Recomputation, before: Plan, after: Plan) -> ChosenRecomputation:
    step = before.report.step.seconds
    return ChosenRecomputation(
        recomputation=recomputation,
        saves=before.report.device_bytes["total"] - after.report.device_bytes["total"],
        costs=after.report.step.seconds - step,
        step=step,
        n_blocks=1 + max(op.block for op in before.assembly.micro.ops),
    )


def sketch_exactly(inputs: PlanInputs, recording: Draft | None = None) -> Plan:
    """Return the sketch with the recomputation that `inputs` name. `recording`: of a plan that it can be made from."""
    if inputs.target is None:
        raise ValueError("a plan needs a device")
    recording = recording or record(inputs)
    assembly = sketch(inputs, recording)
    with assembly.passed.finding_causes():
        report = summarise(assembly, inputs, at_least(assembly.memory, inputs))
    return Plan(inputs=inputs, target=inputs.target, assembly=assembly, report=report, recording=recording)


def run_inputs(run: Run, device: DeviceInfo, world_size: int, nodes: int = 1) -> PlanInputs:
    loaded, config, registry = run.loaded, run.config, run.registry
    _check_length(run)
    _check_weight_format(run, device)
    sharding = config.sharding(world_size)
    _check_sharding(run, sharding)
    registry.check_kernel_choices(config.kernel_choices)
    precision, lowering = _precision(run, device)
    target = Target(device, config.deterministic)
    return PlanInputs(
        ops=registry.ops,
        model=run.model,
        dims=run.dims,
        recipe=registry.recipe(config.recipe),
        recipe_options=loaded.recipe_options,
        loss=chosen_loss(loaded, registry),
        loss_options=loaded.options["loss", config.loss],
        frozen_reference=config.reference == "frozen",
        optimizer=registry.optimizer(config.optimizer),
        optimizer_options=loaded.optimizer_options,
        precision=precision,
        lowering=lowering,
        batch_size=config.per_device_train_batch_size,
        seq_len=config.sequence_len,
        grad_accum_steps=config.gradient_accumulation_steps,
        world_size=world_size,
        sharding=sharding,
        nodes=nodes,
        ranks_per_device=min(config.ranks_per_gpu if device.sm is not None else world_size // nodes, world_size),
        max_documents=config.per_device_train_batch_size
        * documents_in_row(config.sequence_len, config.sample_packing, registry.loss(config.loss).group_size),
        lmhead_chunks=config.lmhead_chunks if isinstance(config.lmhead_chunks, int) else None,
        attn_bwd_chunks=config.attn_bwd_chunks,
        zero_copy=config.use_zero_copy,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        numerics=config.numerics_report_steps > 0,
        recompute=config.recomputed_parts,
        recompute_more=config.recompute == "auto" and (device.sm is not None or config.device_memory_limit is not None),
        offload=list(_strategies(registry, loaded.options)),
        adapters=[_adapter(*run.adapter, config.adapter_path)] if run.adapter else [],
        weight_format=run.weight_format,
        stored_kinds=frozenset({"matrix", *(kind for kind, key in STORED_BY.items() if getattr(config, key))}),
        target=target,
        kernel_for=lambda op: registry.kernel_for(op, target, config.recipe, config.kernel_choices),
    )


def _adapter(adapter: AdapterDef, options: BaseModel, path: str | None) -> tuple[AdapterDef, BaseModel]:
    """Return an adapter, without its start if its params are loaded from `path`."""
    return adapter if path is None else replace(adapter, start=None), options


def _strategies(
    registry: Registry, options: Mapping[tuple[str, str], BaseModel]
) -> Iterator[tuple[OffloadDef, BaseModel]]:
    """Yield the offload strategies that the keys of a run select, with their options."""
    for name in sorted(registry.names("offload")):
        strategy = registry.offload(name)
        if strategy.selected(options["offload", name]):
            yield strategy, options["offload", name]


def _check_weight_format(run: Run, device: DeviceInfo) -> None:
    if run.weight_format is not None:
        format, options = run.weight_format
        support = format.supports(device, options)
        if not support.ok:
            raise ConfigError(f"{format.key}: true cannot run on {device.title}: {support.reason}.")


def _check_sharding(run: Run, sharding: Sharding) -> None:
    """Raise ConfigError for parts that cannot be trained."""
    optimizer = run.registry.optimizer(run.config.optimizer)
    if sharding.gradients and optimizer.granularity is None:
        raise ConfigError(
            f"optimizer: {optimizer.name} declares no granularity, so that ranks cannot divide gradients for it. Set "
            "shard_gradients: false, or use another optimizer."
        )


def _check_length(run: Run) -> None:
    length, longest = run.config.sequence_len, run.dims.max_positions
    longest = min(run.config.max_model_len or longest, longest)
    if length > longest:
        raise ConfigError(
            f"sequence_len: {length} is longer than the model allows ({longest} positions). Use {longest} or less"
            f"{_longer(run)}."
        )


def _longer(run: Run) -> str:
    """Return how a model gets as many positions as `sequence_len`, by RoPE scaling; "" if YaRN is not for it."""
    positions, length = run.model_config.get("max_position_embeddings"), run.config.sequence_len
    if not isinstance(positions, int) or positions < 1 or run.config.rope_scaling is not None:
        return ""
    scaling: dict[str, object] = {"rope_type": "yarn", "factor": float(-(-length // positions))}
    try:
        reaches = run.model.dims(with_rope_scaling(run.model_config, scaling, None)).max_positions >= length
    except ConfigError:
        return ""
    if not reaches:
        return ""
    line = f"rope_scaling: {{rope_type: yarn, factor: {scaling['factor']}}}"
    if run.adapter is None:
        unless = "" if run.config.max_model_len is None else f" and max_model_len: {length}"
        return f", or extend the model by {line}{unless}"
    return f', or extend the base by "rope_scaling": {json.dumps(scaling)} in its config.json'


def _precision(run: Run, device: DeviceInfo) -> tuple[Precision, LoweringDef | None]:
    """Return the dtypes of the run, and what serves those of its products in place of the recipe, if anything does."""
    config, options = run.config, run.loaded.recipe_options
    recipe = run.registry.recipe(config.recipe)
    precision = recipe.precision(config.precision_request, options)
    lowering = _lowering(run.registry, recipe, precision)
    supports = [recipe.supports(device, precision, options)]
    supports += [lowering.supports(device, precision)] if lowering else []
    for support in supports:
        if not support.ok:
            raise ConfigError(f"recipe: {config.recipe} cannot run on {device.title}: {support.reason}.")
    return precision, lowering


def _remarks(run: Run, plan: Plan) -> Iterator[str]:
    """Yield the lines of `Plan.overridden`, also about an optimizer whose states every rank holds whole."""
    yield from run.loaded.notices
    if choice := run.model.row_choice(run.model_config, run.config.sequence_len):
        yield choice.says
    for name, key in DTYPE_KEYS.items():
        asked, used = getattr(run.config.precision_request, f"{name}_dtype"), getattr(plan.inputs.precision, name)
        if asked is not None and asked != used:
            yield f"{key}: {asked} is overridden: recipe {run.config.recipe} uses {used}"
    optimizer = plan.inputs.optimizer
    if plan.inputs.sharding.states and optimizer.granularity is None:
        yield f"optimizer {optimizer.name} declares no granularity: every rank holds all of its states"
    for kind in sorted(run.config.kernel_choices.keys() - plan.kernels.providers.keys()):
        yield f"kernels: {kind}: has no effect, because this run has no such op"


def _lowering(registry: Registry, recipe: RecipeDef, precision: Precision) -> LoweringDef | None:
    pair = precision.matmul, precision.gradient
    if recipe.products is None or pair in recipe.products:
        return None
    name = "/".join(pair)
    if name in registry.names("lowering"):
        found = registry.lowering(name)
        return found
    others = (tuple(name.split("/")) for name in registry.names("lowering"))
    served = ", ".join(f"({matmul}, {gradient})" for matmul, gradient in (*recipe.products, *others))
    hint = DISTRIBUTIONS.get(("lowering", fold(name)))
    raise ConfigError(
        f"matmul_dtype: {pair[0]} with gradient_dtype: {pair[1]} is served neither by recipe {recipe.name} nor by an "
        f"installed package. Supported pairs (matmul_dtype, gradient_dtype): {served}."
        + (f" Try: pip install {hint}" if hint else "")
    )
