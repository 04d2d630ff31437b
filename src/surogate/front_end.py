"""The words of the program for the settings of core, and the names that it keeps for itself."""

from __future__ import annotations

from collections.abc import Collection

from surogate_core.front_end import FrontEnd

SETTINGS = {
    "adapters": "lora: true",
    "allow_reference": "kernels: allow_reference",
    "batch_size": "per_device_train_batch_size",
    "frozen_reference": "reference: frozen",
    "memory_limit": "device_memory_limit",
    "numerics": "numerics_report_steps",
    "offload": "offload_optimizer: true or offload_master: true",
    "reference": "reference: frozen or cached",
    "ranks_per_device": "ranks_per_gpu",
    "recompute: adapter": "lora",
    "seq_len": "sequence_len",
    "stored_kinds: embedding": "quantize_embedding: true",
    "stored_kinds: head": "quantize_lm_head: true",
    "zero_copy": "use_zero_copy",
}
"""Field of core -> what sets it in a YAML file."""


def _keys(kind: str) -> Collection[str]:
    """Return the keys of the mapping in which options stand: an entry of datasets for a format, else the run's."""
    from .config.dataset_entry import DatasetEntry
    from .config.schema import TrainConfig

    return (DatasetEntry if kind == "format" else TrainConfig).model_fields


def _package(kind: str, name: str) -> str | None:
    from .config.keys import DISTRIBUTIONS

    return DISTRIBUTIONS.get((kind, name))


FRONT_END = FrontEnd(distribution="surogate", settings=SETTINGS, keys=_keys, package=_package)
