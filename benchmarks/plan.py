"""Measure processor seconds (user and system) of whole `surogate plan` commands, including interpreter start.

    python benchmarks/plan.py

Prints the minimum of three runs per config: the 8B model of the README, LoRA of Qwen3-32B, and LoRA of Llama-70B twice:
once with changes that make it fit an H200, and once without, which searches for suggestions. No hub is needed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 3
QWEN3_8B = json.loads((Path(__file__).parent / "models/qwen3-8b/config.json").read_text())
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
FITS = {"sequence_len": 1024, "per_device_train_batch_size": 1, "recompute_block": True}
CASES = {
    "Qwen3-8B, all weights (README)": (QWEN3_8B, {"sequence_len": 4096}),
    "Qwen3-32B, LoRA": (QWEN3_32B, {"lora": True, "sequence_len": 2048}),
    "Llama-70B, LoRA, fits": (LLAMA_70B, {"lora": True, **FITS}),
    "Llama-70B, LoRA, does not fit": (LLAMA_70B, {"lora": True, "sequence_len": 4096}),
}


def main() -> None:
    for name, (model, keys) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(model))
            config = Path(folder) / "run.yaml"
            config.write_text(json.dumps({"model": folder, **keys}))
            print(f"{name:<34}{min(seconds(config) for _ in range(RUNS)):6.2f} s")


def seconds(config: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "surogate_core.cli", "plan", str(config), "--device", "h200"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
