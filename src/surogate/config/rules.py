"""Rules between keys, checked when each key by itself is valid. Those of adapters are in `adapter.py`."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from pydantic import BaseModel

from surogate_core.program.passes.tile import MOST, MULTIPLE

from .alerts import alerts_of
from .best import apply_best_rules
from .errors import Findings, keys_of
from .keys import ADAPTER_FLAG, same_value
from .options import Owner
from .registry import Registry
from .schedule_kinds import schedule_problems
from .schema import TrainConfig


def apply_rules(config: TrainConfig, findings: Findings) -> TrainConfig:
    """Check the rules between keys. Return the config with implied values filled in."""
    changes: dict[str, Any] = {}
    if config.torch_dtype is not None:
        if config.model_dtype not in (None, config.torch_dtype):
            findings.wrong("torch_dtype", f"is {config.torch_dtype}, but model_dtype is {config.model_dtype}; keep one")
        changes["model_dtype"] = config.torch_dtype
    if config.max_model_len is not None and config.sequence_len > config.max_model_len:
        findings.wrong("sequence_len", f"is {config.sequence_len}, above max_model_len {config.max_model_len}")
    tokens = config.per_device_train_batch_size * config.sequence_len
    if config.lmhead_chunks != "auto" and tokens % config.lmhead_chunks:
        findings.wrong(
            "lmhead_chunks",
            f"{config.lmhead_chunks} does not divide the {tokens} tokens of a micro-step "
            "(per_device_train_batch_size x sequence_len); use auto, or a divisor of them",
        )
    if config.row_tiles != "auto" and config.row_tiles % MULTIPLE:
        findings.wrong(
            "row_tiles",
            f"{config.row_tiles} is no multiple of {MULTIPLE}; use auto, or "
            f"{max(1, round(config.row_tiles / MULTIPLE)) * MULTIPLE}",
        )
    elif config.row_tiles != "auto" and tokens > MOST * config.row_tiles > 0:
        least = -(-tokens // (MOST * MULTIPLE)) * MULTIPLE
        findings.wrong(
            "row_tiles",
            f"{config.row_tiles} divides the {tokens} tokens of a micro-step into more than {MOST} tiles; use auto, or "
            f"{least} or more",
        )
    if config.per_device_train_batch_size % config.attn_bwd_chunks:
        findings.wrong(
            "attn_bwd_chunks",
            f"{config.attn_bwd_chunks} does not divide the {config.per_device_train_batch_size} rows of a micro-step "
            "(per_device_train_batch_size); use a divisor of it, or remove the key",
        )
    if config.validation_datasets:
        changes["validation_split_ratio"] = 0.0
    kind, settings = config.lr_scheduler_type, config.lr_scheduler_kwargs
    for problem in schedule_problems(kind, settings, config.learning_rate, config.final_lr_fraction):
        findings.wrong(problem.key, problem.text)
    for problem in alerts_of(config.alerts)[1] if config.alerts is not None else ():
        findings.wrong(problem.key, problem.text)
    if config.reference_model is not None and config.reference == "cached":
        findings.wrong("reference", "cached keeps numbers of the run's own model; remove it, or remove reference_model")
    elif config.reference_model is not None:
        changes["reference"] = "frozen"
    split = config.validation_split_ratio or config.validation_datasets
    if kind == "reduce_lr_on_plateau" and not (config.evaluates_between_steps and split):
        findings.wrong(
            "lr_scheduler_type",
            "reduce_lr_on_plateau reads the losses of evaluations, and this run has none between its steps; set "
            "eval_steps and validation_datasets or validation_split_ratio, or use another schedule",
        )
    if config.init_projections_to_zero and not config.from_scratch:
        findings.wrong(
            "init_projections_to_zero", "sets new weights, but from_scratch is false; set it, or remove the key"
        )
    changes |= apply_best_rules(config, findings)
    if config.sample_prompts and config.sample_top_p < 1 and not config.sample_temperature:
        findings.wrong("sample_top_p", f"{config.sample_top_p} has no effect while sample_temperature is 0; set it")
    return config.model_copy(update=changes)


_FORMAT = "weight format"


def selects_weight_format(plugin: Mapping[str, Any], registry: Registry) -> bool:
    """Return whether keys of plugins, as written, store weights in a format. Values that are no flag select none."""
    written = (plugin.get(format.key) for format in registry.weight_formats().values())
    return any(same_value(value, True) for value in written)


def check_weight_formats(
    config: TrainConfig | None, options: MutableMapping[Owner, BaseModel], registry: Registry, findings: Findings
) -> frozenset[str]:
    """Check that one format at most is selected, and that the weights which it stores are frozen.

    Give the formats that are not selected their default options, with a notice for each other key of theirs that is
    set. Return these keys.
    """
    formats = {
        format.key: (_FORMAT, name) for name, format in registry.weight_formats().items() if (_FORMAT, name) in options
    }
    keys = [key for key, owner in formats.items() if getattr(options[owner], key)]
    if len(keys) > 1:
        others = " and ".join(f"{key}: true" for key in keys[1:])
        findings.wrong(keys[0], f"true, but so is {others}; weights have one format, so keep one of these keys")
    if not keys and config is not None:
        for key in ("quantize_lm_head", "quantize_embedding"):
            if getattr(config, key):
                findings.wrong(key, "true, but no weight format is selected; select one, or remove the key")
    if keys and config is not None and config.adapter is None:
        findings.wrong(
            keys[0],
            f"stores frozen weights, but this run trains all of them; set {ADAPTER_FLAG.key}: true (the default with "
            "this key), or remove the key",
        )
    used = {option for key in keys for option in keys_of(type(options[formats[key]]))}
    idle = {key: owner for key, owner in formats.items() if key not in keys}
    return frozenset(option for key, owner in idle.items() for option in _reset(key, owner, options, used, findings))


def _reset(
    key: str, owner: Owner, options: MutableMapping[Owner, BaseModel], used: set[str], findings: Findings
) -> list[str]:
    """Give a format that is not selected its default options. Return its keys besides those that are `used`."""
    given, model = options[owner].model_fields_set, type(options[owner])
    idle = [name for name in keys_of(model) if name not in used and name != key]
    for name, field in zip(keys_of(model), model.model_fields, strict=True):
        if field in given and name in idle:
            findings.notices.append(
                f"{name}: has no effect, since {_FORMAT} {owner[1]} is not used by this run ({key}: true selects it)"
            )
    options[owner] = model()
    return idle
