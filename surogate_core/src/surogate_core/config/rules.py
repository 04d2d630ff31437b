"""Rules between core's keys, checked when each key by itself is valid. Those of adapters are in `adapter.py`."""

from __future__ import annotations

from typing import Any

from .findings import Findings
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
    if config.per_device_train_batch_size % config.attn_bwd_chunks:
        findings.wrong(
            "attn_bwd_chunks",
            f"{config.attn_bwd_chunks} does not divide the {config.per_device_train_batch_size} rows of a micro-step "
            "(per_device_train_batch_size); use a divisor of it, or remove the key",
        )
    if config.validation_datasets:
        changes["validation_split_ratio"] = 0.0
    if config.init_projections_to_zero and not config.from_scratch:
        findings.wrong(
            "init_projections_to_zero", "sets new weights, but from_scratch is false; set it, or remove the key"
        )
    return config.model_copy(update=changes)
