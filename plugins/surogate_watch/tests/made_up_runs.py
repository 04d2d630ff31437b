"""Output folders of made-up runs, for tests and for the picture of the documentation."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping
from math import exp
from pathlib import Path
from typing import Any

NOW = 1_800_000_000.0
GIB = 1 << 30


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    total: int = 100,
    seconds: float = 2.0,
    tokens: int = 32768,
    age: float = 1.0,
    planned: Mapping[str, float] | None = None,
    memory: int | None = None,
    holder: Mapping[str, Any] | None = None,
    outputs: bool = False,
    start: float = 2.4,
) -> Path:
    """Write a run that has done `steps` of `total`, the last one `age` seconds before NOW."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(f"model: m\noutput_dir: {folder}\nlog_file: null\n")
    began = NOW - age - steps * seconds
    run = {
        "log": "run",
        "run_name": folder.name,
        "time": began,
        "device": "NVIDIA H100 80GB HBM3",
        "total_steps": total,
    }
    records: list[dict[str, Any]] = [run | ({"planned": dict(planned)} if planned else {})]
    noise = random.Random(folder.name)
    for step in range(1, steps + 1):
        at = began + step * seconds
        loss = start * (0.55 + 0.45 * exp(-4 * step / total)) + noise.gauss(0, 0.02)
        figures = {"epoch": 0.1, "norm": 1.0, "lr": 1e-4, "valid_tokens": tokens, "tokens_per_second": tokens / seconds}
        records.append(
            {
                "log": "step",
                "step": step,
                "loss": loss,
                "tokens": tokens,
                "duration_ms": seconds * 1e3,
                "time": at,
                **figures,
            }
        )
    if steps >= 20:
        records.append({"log": "eval", "step": steps, "loss": records[-1]["loss"] + 0.03, "time": NOW - age})
    if memory:
        records += [
            {"log": "gpu", "step": steps, "gpu": n, "memory_used_bytes": memory, "time": NOW - age} for n in (0, 1)
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if holder is not None:
        (folder / ".surogate.lock").write_text(json.dumps({"host": socket.gethostname(), "time": began, **holder}))
    if outputs:
        (folder / "model.safetensors").touch()
    return folder


def one_of_each(root: Path) -> Path:
    """Write a folder with a run in each state."""
    alive, gone = {"pid": os.getpid()}, {"pid": 2**22 + 1}
    plan = {"tokens_per_second": 16500.0, "device_bytes": 61.2 * GIB}
    write_run(root / "qwen3-8b-chats", steps=412, total=1200, planned=plan, memory=int(60.7 * GIB), holder=alive)
    write_run(
        root / "qwen3-8b-nf4", steps=230, total=1200, seconds=3.4, memory=int(17.1 * GIB), holder=alive, start=2.1,
        planned={"tokens_per_second": 11800.0, "device_bytes": 16.9 * GIB},
    )  # fmt: skip
    write_run(
        root / "llama-1b-code", steps=95, total=2000, planned=plan, holder=alive, age=1900, memory=int(60.5 * GIB)
    )
    write_run(
        root / "qwen3-0.6b-texts", steps=800, total=800, seconds=0.5, outputs=True, age=7200, memory=int(12.9 * GIB),
        planned={"tokens_per_second": 66400.0, "device_bytes": 13.1 * GIB}, start=3.1,
    )  # fmt: skip
    write_run(root / "qwen3-4b-first", steps=31, total=900, planned=plan, age=90_000)
    write_run(root / "qwen3-4b-second", steps=64, total=900, planned=plan, holder=gone, age=500)
    write_run(root / "qwen3-14b", steps=0, total=900, planned=plan, holder=alive, age=20)
    return root
