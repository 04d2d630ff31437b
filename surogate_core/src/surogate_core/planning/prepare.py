"""From a validated config to a plan: which plugins serve it, which model it is, what it holds and costs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..api import DeviceInfo, Op, Target
from ..config.load import LoadedConfig
from ..config.rope_scaling import with_rope_scaling
from ..data.pieces import max_pieces
from ..errors import ConfigError
from ..hub.config_json import read_config
from ..hub.files import CONFIG_FILES, resolve_model_dir
from ..memory.report import Report, report
from ..plugins.registry import REFERENCE, Registry, Resolved
from .assemble import Assembly, PlanInputs, assemble, op_workspace


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is planned and not started.

    target: the device, and whether bits must repeat. kernels: kind of op -> who serves it on the device. refusals: kind
    of op -> why compiled kernels do not. notices: what the kernels have to tell a user who plans.
    """

    loaded: LoadedConfig
    registry: Registry
    model_dir: Path
    model_config: Mapping[str, Any]
    target: Target
    inputs: PlanInputs
    assembly: Assembly
    report: Report
    kernels: Mapping[str, str]
    refusals: Mapping[str, tuple[str, ...]]
    notices: tuple[str, ...]

    @property
    def n_params(self) -> int:
        """Elements of all model weights."""
        return sum(v.size for v in self.assembly.declared if v.role == "param")

    @property
    def n_trainable(self) -> int:
        """Elements of the weights that are trained."""
        return sum(v.size for v in self.assembly.trainable)


def prepare(
    loaded: LoadedConfig,
    registry: Registry,
    device: DeviceInfo,
    patterns: Sequence[str] = CONFIG_FILES,
    world_size: int | None = None,
    revise: Callable[[PlanInputs], PlanInputs] = lambda given: given,
) -> Prepared:
    """Plan a run on `device`, and on `world_size` - 1 others like it; None: as many as the config's `gpus` names.

    `revise` changes what the run is made of before it is planned.

    `patterns` are the files of the model to have at hand: its config to plan, its tokenizer and weights to train.
    Raises ConfigError or PluginError when config, model, recipe and device do not go together.
    """
    config = loaded.config
    if world_size is None:
        world_size = max(config.gpus, 1)
        if world_size > 1 and device.sm is None:
            raise ConfigError(
                f"gpus: {world_size}: a CPU trains alone. Use gpus: 1, or name the GPU to plan for: --device h200."
            )
    model_dir = resolve_model_dir(config.model, patterns)
    model_config = with_rope_scaling(read_config(model_dir), config.rope_scaling, config.max_model_len)
    given = revise(replace(_plan_inputs(loaded, registry, model_config, device), world_size=world_size))
    target = Target(device, config.deterministic)
    resolved: dict[str, Resolved] = {}
    notices: dict[str, None] = {}  # in order, each once

    @cache
    def workspace(op: Op) -> int:
        found = registry.kernel_for(op, target, config.recipe)
        if op.kind not in resolved or found.kernel is None:
            resolved[op.kind] = found
        if found.kernel is None:
            return op_workspace(given.ops, op)
        notices[found.kernel.notice(op, target)] = None
        return found.kernel.workspace(op, target)

    given = replace(given, workspace=workspace)
    assembly = assemble(given)
    return Prepared(
        loaded=loaded,
        registry=registry,
        model_dir=model_dir,
        model_config=model_config,
        target=target,
        inputs=given,
        assembly=assembly,
        report=summarise(assembly, given, given.grad_accum_steps),
        kernels={kind: found.provider for kind, found in sorted(resolved.items())},
        refusals={kind: found.refusals for kind, found in resolved.items() if found.provider == REFERENCE},
        notices=tuple(filter(None, notices)),
    )


def max_documents(sample_packing: bool, seq_len: int, rows: int) -> int:
    """Most documents that a micro-step of `rows` rows can hold, the padding at the end of a row counted as one."""
    return ((max_pieces(seq_len) if sample_packing else 1) + 1) * rows


def summarise(assembly: Assembly, given: PlanInputs, grad_accum_steps: int) -> Report:
    """The report of an assembled run."""
    if given.device is None:
        raise ValueError("a report needs a device")
    return report(
        assembly.programs,
        assembly.memory,
        given.ops,
        given.device,
        grad_accum_steps=grad_accum_steps,
        tokens_per_micro_step=given.batch_size * given.seq_len,
        world_size=given.world_size,
    )


def _plan_inputs(
    loaded: LoadedConfig, registry: Registry, model_config: Mapping[str, Any], device: DeviceInfo
) -> PlanInputs:
    config = loaded.config
    model = registry.model_for(model_config)
    try:
        dims = model.dims(model_config)
    except ConfigError as error:
        scaled = "" if config.rope_scaling is None else f", with the rope_scaling of {loaded.source}"
        raise ConfigError(f"{config.model}/config.json{scaled}: {error}") from None
    longest = min(config.max_model_len or dims.max_positions, dims.max_positions)
    if config.sequence_len > longest:
        raise ConfigError(
            f"sequence_len: {config.sequence_len} is longer than the model allows ({longest} positions). "
            f"Use {longest} or less."
        )
    recipe = registry.get("recipe", config.recipe)
    precision = recipe.precision(config.precision_request, loaded.recipe_options)
    support = recipe.supports(device, precision, loaded.recipe_options)
    if not support.ok:
        raise ConfigError(f"recipe: {config.recipe} cannot run on {device.title}: {support.reason}.")
    offload = config.offload
    return PlanInputs(
        ops=registry.ops,
        model=model,
        dims=dims,
        recipe=recipe,
        recipe_options=loaded.recipe_options,
        optimizer=registry.get("optimizer", config.optimizer),
        optimizer_options=loaded.optimizer_options,
        precision=precision,
        batch_size=config.per_device_train_batch_size,
        seq_len=config.sequence_len,
        grad_accum_steps=config.gradient_accumulation_steps,
        max_documents=max_documents(config.sample_packing, config.sequence_len, config.per_device_train_batch_size),
        lmhead_chunks=config.lmhead_chunks if isinstance(config.lmhead_chunks, int) else None,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        recompute=config.recompute,
        offload=(registry.get("offload", offload), loaded.options["offload", offload]) if offload else None,
        adapters=[(registry.get("adapter", name), options) for name, options in loaded.adapters.items()],
        device=device,
    )
