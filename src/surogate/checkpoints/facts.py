"""The facts that a resumed run must have in common with the saved one, by id.

Ids are part of the format of checkpoints and never change. Their texts are for messages alone, and may be reworded.
Facts that have no text here are keyed by the config key that decides them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

ROWS = "rows_per_step"
TOTAL_STEPS = "total_steps"
"""The rows of an optimizer step, and the number of steps."""

WEIGHTS, FILES, FROZEN = "base_weights", "base_files", "base_held_as"
"""Of an adapter's base: a hash of its weights, the form of its files, and the form that the run holds."""

DATA, DATASETS = "data", "token_caches"
"""{"rows", "tokens", "content": a hash of tokens and labels}, and for each of `datasets` {"type", "version", "cache":
name}. Older checkpoints have no DATASETS, an "identity" of the caches in DATA, and before 0.2.0 no "content"."""

THREADS = "cpu_threads"
"""Among the versions of a checkpoint that was computed on a CPU: their number changes bits."""

MODEL_CONFIG = "model_config."
"""Before a key of the model's config.json."""

UNQUANTIZED = "unquantized"
"""FILES of a base without a quantization_config."""

_TEXTS = {
    ROWS: "rows in an optimizer step (per_device_train_batch_size x gradient_accumulation_steps x GPUs)",
    TOTAL_STEPS: "steps in all (max_steps or num_epochs)",
    WEIGHTS: "base weights",
    FILES: "base files",
    FROZEN: "frozen weights",
    DATA: "training data",
    DATASETS: "token caches",
    THREADS: "CPU threads (OMP_NUM_THREADS)",
}

_BEFORE = {
    "rows in an optimizer step (per_device_train_batch_size x gradient_accumulation_steps x GPUs)": ROWS,
    "steps in all (max_steps or num_epochs)": TOTAL_STEPS,
    "base weights": WEIGHTS,
    "base files": FILES,
    "frozen weights": FROZEN,
    "training data": DATA,
}
"""Keys of checkpoints of 0.1.0 and 0.2.0, which were the sentences of that time -> ids."""

_CONTENT_BEFORE = "hash of its tokens"
_DATA_BEFORE = re.compile(r"([\d,]+) rows, ([\d,]+) tokens, (\w+)")


def fact_text(fact: str) -> str:
    """Return what a fact is called in messages."""
    if fact.startswith(MODEL_CONFIG):
        return f"config.json {fact.removeprefix(MODEL_CONFIG)}"
    return _TEXTS.get(fact, fact)


def value_text(fact: str, value: Any) -> str:
    """Return the value of a fact as messages give it."""
    if fact == DATA and isinstance(value, Mapping):
        hash_of = value.get("content") or value.get("identity")
        return f"{value.get('rows'):,} rows, {value.get('tokens'):,} tokens, {hash_of}"
    if fact == FILES and value == UNQUANTIZED:
        return "floating point"
    return value if isinstance(value, str) else json.dumps(value)


def facts_of_format_1(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a checkpoint of 0.1.0 or 0.2.0 by id. Raises ValueError if it cannot have written them."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        of_config = key.removeprefix("config.json ")
        found[_BEFORE.get(key, key if of_config == key else f"{MODEL_CONFIG}{of_config}")] = value
    content = found.pop(_CONTENT_BEFORE, None)
    if found.get(FILES) == "floating point":
        found[FILES] = UNQUANTIZED
    if DATA in found:
        data = _DATA_BEFORE.fullmatch(str(found[DATA]))
        if data is None:
            raise ValueError(f"facts: the training data are {found[DATA]!r}")
        rows, tokens = (int(number.replace(",", "")) for number in data.groups()[:2])
        found[DATA] = {"rows": rows, "tokens": tokens, "identity": data[3], **({"content": content} if content else {})}
    return found
