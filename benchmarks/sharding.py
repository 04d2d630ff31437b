"""The table of docs/sharding.md: models and the machines that they fit, made of plans. Needs no GPU.

python benchmarks/sharding.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from surogate import run
from surogate_core.planning.report import Report

MODELS = Path(__file__).parent / "models"
DEVICE, GIB = "h100", 1 << 30
TRAINED = {"sequence_len": 4096, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
RUNS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "Qwen3-8B, all weights": ("qwen3-8b", {}),
    "Qwen3-32B, all weights, fp8-hybrid": ("qwen3-32b", {"recipe": "fp8-hybrid"}),
    "Llama-3.1-70B, LoRA": ("llama-3.1-70b", {"lora": True}),
    "Llama-3.1-70B, all weights": ("llama-3.1-70b", {}),
}
GPUS = ((8, 1), (16, 2), (32, 4))
HEADINGS = ("run", "GPUs", "level 1", "level 2", "level 3", "tokens/s with the first that fits")


def planned(model: str, keys: Mapping[str, object], gpus: int, nodes: int, level: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        given = {"model": str(MODELS / model), "output_dir": folder, "datasets": [{"path": "x.txt", "type": "text"}]}
        path.write_text(yaml.safe_dump({**given, **TRAINED, "zero_level": level, **keys}))
        return run.plan(run.load(path), DEVICE, gpus=gpus, nodes=nodes).report


def rows() -> Iterator[tuple[str, ...]]:
    for name, (model, keys) in RUNS.items():
        for gpus, nodes in GPUS:
            reports = [planned(model, keys, gpus, nodes, level) for level in (1, 2, 3)]
            cells = [f"{r.device_bytes['total'] / GIB:.0f} GiB" if r.fits else "-" for r in reports]
            first = next((r for r in reports if r.fits), None)
            yield name, str(gpus), *cells, f"{first.tokens_per_second:,.0f}" if first else "-"
            if first:  # more GPUs fit too
                break


def main() -> None:
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    for row in rows():
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
