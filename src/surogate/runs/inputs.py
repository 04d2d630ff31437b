"""From the keys of a run to the inputs of the planner."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import BaseModel

from surogate_core.api import AdapterDef, DeviceInfo, OffloadDef, Target
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import ConfigError
from surogate_core.plugins.precision import choose_precision
from surogate_core.plugins.registry import Registry
from surogate_core.program.shards import Sharding

from ..config.rope_scaling import longer_scaling, with_rope_scaling
from ..config.schema import STORED_BY
from ..data.pieces import documents_in_row
from ..hub.config_json import text_part, with_text_part
from .run import Run, chosen_loss
from .samples import beside


def run_inputs(run: Run, device: DeviceInfo, world_size: int, nodes: int = 1) -> PlanInputs:
    loaded, config, registry = run.loaded, run.config, run.registry
    _check_length(run)
    _check_weight_format(run, device)
    sharding = config.sharding(world_size)
    _check_sharding(run, sharding)
    registry.check_kernel_choices(config.kernel_choices)
    recipe = registry.recipe(config.recipe)
    precision, lowering = choose_precision(registry, recipe, loaded.recipe_options, config.precision_request, device)
    target = Target(device, config.deterministic)
    return PlanInputs(
        ops=registry.ops,
        model=run.model,
        dims=run.dims,
        recipe=recipe,
        recipe_options=loaded.recipe_options,
        loss=chosen_loss(loaded, registry),
        loss_options=loaded.options["loss", config.loss],
        frozen_reference=config.reference == "frozen",
        other_reference=config.reference_model is not None,
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
        row_tiles=config.row_tiles if isinstance(config.row_tiles, int) else None,
        decoded_experts=config.decoded_experts if isinstance(config.decoded_experts, int) else None,
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
        beside=beside(run, precision, device),
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
    whole, blocks = sharding.whole_blocks, run.dims.n_layers
    if whole and not sharding.weights:
        raise ConfigError(f"whole_blocks: {whole}: no rank divides weights here. Set zero_level: 3, or remove the key.")
    if whole > blocks:
        raise ConfigError(f"whole_blocks: {whole} is more than the {blocks} blocks of the model. Use {blocks} or less.")


def _check_length(run: Run) -> None:
    length, longest = run.config.sequence_len, run.dims.max_positions
    longest = min(run.config.max_model_len or longest, longest)
    if length > longest:
        raise ConfigError(
            f"sequence_len: {length} is longer than the model allows ({longest} positions). Use {longest} or less"
            f"{_longer(run)}."
        )


def _longer(run: Run) -> str:
    """Return how a model gets as many positions as `sequence_len`, by RoPE scaling; "" if no scaling does it."""
    length = run.config.sequence_len
    found = scaled_model(run, length)
    if found is None:
        return ""
    unless = "" if run.config.max_model_len is None else f" and max_model_len: {length}"
    extends = "the base by" if run.adapter else "the model by"
    return f", or extend {extends} {scaling_line(found[0], of_base=run.adapter is not None)}{unless}"


def scaling_line(scaling: Mapping[str, object], *, of_base: bool) -> str:
    """Return the line that gives a model a RoPE scaling: of the run's file, or of the base of an adapter, whose files
    must say it themselves."""
    if of_base:
        return f'"rope_scaling": {json.dumps(scaling)} in its config.json'
    return f"rope_scaling: {{{', '.join(f'{key}: {value}' for key, value in scaling.items())}}}"


def scaled_model(run: Run, length: int) -> tuple[Mapping[str, object], Run] | None:
    """Return a RoPE scaling with which the run's model has `length` positions, and the run with that model; None: there
    is none."""
    text = text_part(run.model_config)
    scaling = longer_scaling(text, length)
    if scaling is None:
        return None
    try:
        config = with_text_part(run.model_config, with_rope_scaling(text, scaling, None))
        dims = run.model.configure(run.model.dims(config), run.model_options)
    except ConfigError:
        return None
    return (scaling, replace(run, model_config=config, dims=dims)) if dims.max_positions >= length else None
