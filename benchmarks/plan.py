"""Measure processor seconds (user and system) of whole `surogate plan` commands, including interpreter start.

    python benchmarks/plan.py

Prints the minimum of three runs per config: the 8B model of the README, LoRA of Qwen3-32B, and LoRA of Llama-3.1-70B
twice: once with changes that make it fit an H200, and once without, which searches for suggestions. Then the same on
eight H100s, and two searches by `--fit`. No hub is needed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RUNS = 3
MODELS = Path(__file__).parent / "models"
FITS = {"sequence_len": 1024, "per_device_train_batch_size": 1, "recompute_block": True}
LORA_70B = {"lora": True, "sequence_len": 4096}
CASES = {
    "Qwen3-8B, all weights (README)": ("qwen3-8b", {"sequence_len": 4096}, ()),
    "Qwen3-32B, LoRA": ("qwen3-32b", {"lora": True, "sequence_len": 2048}, ()),
    "Llama-70B, LoRA, fits": ("llama-3.1-70b", {"lora": True, **FITS}, ()),
    "Llama-70B, LoRA, does not fit": ("llama-3.1-70b", LORA_70B, ()),
    "Llama-70B, LoRA, does not fit 8": ("llama-3.1-70b", LORA_70B, ("--device", "h100", "--gpus", "8")),
    "Qwen3-8B, --fit rtx4090": ("qwen3-8b", {"sequence_len": 4096}, ("--device", "rtx4090", "--fit", "rtx4090")),
    "Llama-70B, LoRA, --fit 8GiB": ("llama-3.1-70b", LORA_70B, ("--fit", "8GiB")),
}
"""Name -> model, keys, and arguments of the command after `--device h200`."""


def main() -> None:
    for name, (model, keys, arguments) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "run.yaml"
            config.write_text(json.dumps({"model": str(MODELS / model), **keys}))
            print(f"{name:<34}{min(seconds(config, arguments) for _ in range(RUNS)):6.2f} s", flush=True)


def seconds(config: Path, arguments: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "surogate.cli", "plan", str(config), "--device", "h200", *arguments]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    assert done.returncode in (0, 4), done  # 4: it does not fit
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
