"""The copy of a run's model that writes samples: the memory that it takes, and runs that cannot have one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

from surogate_core.api import WRITES_TEXT, DeviceInfo, Precision
from surogate_core.assembly.inputs import Beside
from surogate_core.dtypes import DTYPES
from surogate_core.errors import ConfigError

from ..hub.config_json import text_part
from .run import Run

PROCESS_BYTES: Final = 1 << 30
"""Host memory of a process with torch, transformers and PEFT, without a model. Measured: 0.45 GiB, and 0.15 more while
it loads a model of 0.7 GiB."""
_LOGITS: Final = 4
"""fp32 arrays of the vocabulary that choosing a token takes."""
_ACTIVATIONS: Final = 4
"""Arrays of the widest activation of a block that are there at once while a prompt is read."""


def beside(run: Run, precision: Precision, device: DeviceInfo) -> Beside:
    """Return the memory of the process that writes samples. Raises ConfigError for a run that can have none."""
    if not run.config.sample_prompts:
        return lambda trained: ({}, {})
    if why := why_unwritten(run):
        raise ConfigError(f"sample_prompts: {why}. Remove the key.")
    model, on_host = copy_bytes(run, precision), device.sm is None or run.config.sample_on == "host"

    def needed(trained: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        copy = model + (DTYPES["fp32"].nbytes(trained) if run.adapter else 0)  # PEFT keeps adapters in fp32
        if on_host:
            return {}, {"samples": copy + PROCESS_BYTES}
        return {"samples": copy + device.runtime_bytes}, {"samples": PROCESS_BYTES}

    return needed


def copy_bytes(run: Run, precision: Precision) -> int:
    """Return the bytes of the model, without an adapter, and of what it needs to write samples as long as a row."""
    config = run.config
    at_once = config.sample_batch_size  # of a file, nobody knows yet how many prompts it has
    if not isinstance(config.sample_prompts, str):
        at_once = min(at_once, len(config.sample_prompts))
    text, tokens, dtype = text_part(run.model_config), at_once * config.sequence_len, precision.model
    shapes = [tensor.shape for weight in run.model.weights(run.dims) for tensor in weight.tensors]
    inner = [shape for shape in shapes if run.dims.vocab_size not in shape]
    widest = max((max(shape[-2:]) for shape in inner), default=0)
    width = _number(text.get("num_key_value_heads")) * _number(text.get("head_dim")) or widest
    cached = 2 * run.dims.n_layers * tokens * width
    chosen = DTYPES["fp32"].nbytes(_LOGITS * at_once * run.dims.vocab_size)
    return DTYPES[dtype].nbytes(sum(map(prod, shapes)) + cached + _ACTIVATIONS * tokens * widest) + chosen


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def why_unwritten(run: Run) -> str:
    """Return why the model of a run, or its adapter, writes no text in transformers and PEFT; "" if it does."""
    model, config = run.model, run.config
    if not model.in_transformers:
        return f"transformers, which writes samples, does not have {model.name}"
    if model.loaded_by not in WRITES_TEXT:
        return f"loss: {config.loss} trains a head that writes no text"
    if run.adapter is not None and run.adapter[0].library != "peft":
        return f"PEFT, which loads adapters for samples, does not read adapter {run.adapter[0].name}"
    if run.adapter is not None and config.from_scratch:
        return "the base of the adapter is drawn (from_scratch), and in no file that samples could read"
    if run.adapter is not None and config.rope_scaling is not None:
        return "rope_scaling is not in the config.json of the adapter's base, which samples read"
    return ""
