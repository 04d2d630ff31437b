"""Output folders of runs that never ran: metrics of any length, with what pages must show or withstand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import cos, exp, pi
from pathlib import Path
from random import Random
from typing import Any

Json = dict[str, Any]

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
"""Text that would run if it were written into a page as it is."""


def records(
    steps: int,
    *,
    total: int | None = None,
    every: int = 10,
    name: str = "made up",
    rate: float = 1e-3,
    change: Callable[[Json], Json | None] = lambda record: record,
    **config: Any,
) -> Iterator[Json]:
    """Yield the records of a run of `steps` steps, evaluated every few steps. `change`: of each record, or None."""
    rng, tokens = Random(7), 1024
    keys = {"max_grad_norm": 1.0, "lr_scheduler_type": "cosine", "recipe": "bf16", "optimizer": "adamw"}
    total = total or max(steps, 1)
    head = {
        "log": "run",
        "run_name": name,
        "time": 1.0,
        "config": keys | {"learning_rate": rate} | config,
        "versions": {"surogate": "0.2.0"},
        "device": "NVIDIA H200",
        "parameters": 8_190_735_360,
        "trainable_parameters": 43_646_976,
        "total_steps": total,
        "steps_per_epoch": 100,
        "tokens_per_step": tokens,
        "planned": {"tokens_per_second": 10_000.0, "device_bytes": 24 * 2**30},
    }
    if (first := change(head)) is not None:
        yield first
    for step in range(1, steps + 1):
        loss = 1.2 + 6 * exp(-step / (0.2 * total)) + rng.gauss(0, 0.05)
        lr = rate * min(1.0, step / 20) * (0.5 + 0.5 * cos(pi * step / total))
        record: Json = {"log": "step", "step": step, "epoch": step / 100, "loss": loss, "norm": 0.5 + rng.random()}
        record |= {"lr": lr, "tokens": tokens, "valid_tokens": 1000, "tokens_per_second": 9_500 + rng.gauss(0, 200)}
        record |= {"duration_ms": 107.0, "time": 2.0 + step}
        if (found := change(record)) is not None:
            yield found
        if step % every == 0 or step == steps:
            held = {
                "log": "eval",
                "step": step,
                "loss": loss + 0.1,
                "valid_tokens": 900,
                "duration_ms": 50.0,
                "time": 3.0,
            }
            if (found := change(held)) is not None:
                yield found


def write_run(folder: Path, found: Iterator[Json], *, cut: str = "", plan: Json | None = None) -> Path:
    """Write the folder of a run. `cut`: the beginning of a last line that was never finished."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in found)
    (folder / "metrics.jsonl").write_text(text + cut, encoding="utf-8")
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return folder


def preferences(record: Json) -> Json:
    """Give a record what a loss of preferences reports."""
    if record["log"] == "run":
        return record
    grown = record["step"] / 100
    metrics = {"rewards/chosen": -0.5 * grown, "rewards/rejected": -2 * grown, "rewards/margins": 1.5 * grown}
    own = {"in_nats": False} if record["log"] == "eval" else {}
    return record | own | {"groups": 4, "metrics": metrics | {"rewards/accuracies": min(0.5 + grown / 4, 0.9)}}


def numerics(step: int, blocks: int = 3) -> Json:
    """Return a report on numerics with one tensor that exceeds its format."""
    tensors = {
        f"layers.{block}.{part}": [0.4 + 0.1 * block + (0.6 if part == "mlp.down" else 0), 0.0, 1e-3]
        for block in range(blocks)
        for part in ("attn.qkv", "mlp.gate_up", "mlp.down")
    }
    return {"log": "numerics", "step": step, "columns": ["range", "clipped", "error"], "tensors": tensors, "time": 4.0}


def sample(step: int, prompt: str = "Once upon a time", text: str = "there was a king.") -> Json:
    return {"log": "sample", "step": step, "prompt": prompt, "text": text, "time": 5.0}


def gpu(step: int, used: int = 23 * 2**30) -> Json:
    figures = {"utilization": 0.99, "memory_utilization": 0.7, "memory_used_bytes": used, "memory_total_bytes": 2**37}
    power = {"power_watts": 690.0, "power_limit_watts": 700.0, "temperature_celsius": 60}
    return {"log": "gpu", "step": step, "gpu": 0} | figures | power | {"sm_clock_mhz": 1900, "memory_clock_mhz": 3000}
