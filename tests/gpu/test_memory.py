"""The GPU memory of a process equals the plan, from its first allocation to its twentieth step.

Each configuration trains in a separate process. Every few milliseconds this process queries cudaMemGetInfo for the
memory in use since before the start, which includes the CUDA context, libraries and graphs. Prints a line per
configuration for benchmarks/h200.md (`pytest -s`).
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surogate_core.machine.devices import GIB
from surogate_core.plugins.discovery import load_registry

from .alone import ALONE

pytestmark = [pytest.mark.gpu, ALONE]

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "benchmarks" / "models"
ALLOWED = 0.01
POLL_SECONDS = 0.004
BF16_STATES = {"param_grad_dtype": "bf16", "optimizer": "adamw", "optimizer_state_dtype": "bf16"}

CONFIGURATIONS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "Qwen3-0.6B, 2,048 x 8": ("qwen3-0.6b", 2048, 8, {}),
    "Qwen3-0.6B, 4,096 x 8, packed": ("qwen3-0.6b", 4096, 8, {"sample_packing": True}),
    "Qwen3-1.7B, 2,048 x 8": ("qwen3-1.7b", 2048, 8, {}),
    "Qwen3-1.7B, 8,192 x 1": ("qwen3-1.7b", 8192, 1, {}),
    "Qwen3-8B, 2,048 x 4, bf16 gradients and moments": ("qwen3-8b", 2048, 4, BF16_STATES),
    "Qwen3-8B, 4,096 x 2, bf16 gradients and moments": ("qwen3-8b", 4096, 2, BF16_STATES),
    "Qwen3-0.6B, 2,048 x 8, auto in 20 GiB": (
        *("qwen3-0.6b", 2048, 8),
        {**BF16_STATES, "device_memory_limit": "20GiB"},
    ),
    "Qwen3-8B, 2,048 x 4, auto in 84 GiB": (
        *("qwen3-8b", 2048, 4),
        {**BF16_STATES, "device_memory_limit": "84GiB"},
    ),
    "Qwen3-0.6B, 2,048 x 8, FP8": ("qwen3-0.6b", 2048, 8, {"recipe": "fp8-hybrid"}),
}
"""Model, sequence length, batch size, other settings."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_memory_of_a_run_from_scratch_equals_the_plan(name: str) -> None:
    model, seq_len, batch_size, settings = CONFIGURATIONS[name]
    check(name, {**config(MODELS / model, seq_len, batch_size), "from_scratch": True, **settings})


def test_memory_of_a_run_from_a_checkpoint_equals_the_plan(tmp_path: Path) -> None:
    write_checkpoint(MODELS / "qwen3-0.6b", tmp_path)
    check("Qwen3-0.6B, 2,048 x 4, weights from disk", config(tmp_path, 2048, 4))


def config(model: Path, seq_len: int, batch_size: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "sequence_len": seq_len,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 2,
        "sample_packing": False,
    }


def write_checkpoint(model: Path, folder: Path) -> None:
    """Write a bf16 checkpoint for `model` that repeats 16M random numbers."""
    shutil.copy(model / "config.json", folder)
    described = json.loads((model / "config.json").read_text())
    definition = load_registry().model_for(described)
    tensors = [t for weight in definition.weights(definition.dims(described)) for t in weight.tensors]
    noise = (0.02 * torch.randn(1 << 24)).bfloat16()
    contents = {}
    for tensor in tensors:
        size = torch.Size(tensor.shape).numel()
        contents[tensor.name] = noise.repeat(-(-size // noise.numel()))[:size].reshape(tensor.shape).contiguous()
    save_file(contents, folder / "model.safetensors")


def check(name: str, raw: dict[str, Any]) -> None:
    """Check that the peak memory of the process differs from the plan's total by at most a fraction ALLOWED."""
    planned, peaks = observe(raw)
    held = max(peaks.values())
    phases = ", ".join(f"{phase} {peak / GIB:.2f}" for phase, peak in peaks.items())
    off = held / planned - 1
    print(f"\n| {name} | {planned / GIB:.2f} GiB | {held / GIB:.2f} GiB | {100 * off:+.2f} % | {phases} |")
    assert abs(off) <= ALLOWED, (
        f"{held - planned >> 20:+} MiB relative to the plan of {planned >> 20} MiB; GiB by phase: {phases}"
    )


def observe(raw: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Run the config `raw` in a process. Return (planned bytes, peak bytes by phase)."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    empty = torch.cuda.mem_get_info()[0]
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("hold_memory.py")), json.dumps(raw)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = ["phase start"]

    def read() -> None:
        for line in child.stdout or ():
            lines.append(line.rstrip())

    reader = Thread(target=read)
    reader.start()
    peaks: dict[str, int] = {}
    while child.poll() is None:
        held = empty - torch.cuda.mem_get_info()[0]
        phase = next(line for line in reversed(lines) if line.startswith("phase ")).removeprefix("phase ")
        peaks[phase] = max(peaks.get(phase, 0), held)
        time.sleep(POLL_SECONDS)
    reader.join()
    assert child.returncode == 0, "\n".join(lines[-30:])
    assert {"construction", "loading", "capture", "steps"} <= set(peaks), f"phases observed: {list(peaks)}"
    (planned,) = [int(line.removeprefix("plan ")) for line in lines if line.startswith("plan ")]
    return planned, peaks
