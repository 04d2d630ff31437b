"""The loss of training in NVFP4, whole and with each of its parts switched off, against bf16.

    python benchmarks/convergence.py prepare work --text docs.jsonl --chat gsm8k.jsonl
    python benchmarks/nvfp4.py train work
    python benchmarks/nvfp4.py compare work --picture docs/nvfp4-loss.png
    python benchmarks/convergence.py train work full bf16
    python benchmarks/nvfp4.py train work --lora
    python benchmarks/nvfp4.py compare work --lora

`train` trains a Qwen3 of 98M parameters from scratch, 1,000 steps of 8,192 tokens of real text, with three seeds of the
weights and of the order of the data; with `--lora` an adapter on the model of the run full bf16, on questions and
answers. See seeds.py for `--part` and `compare`, whose last column is the difference of the training loss, mean of the
last 50 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import qlora
from convergence import COMMON, FULL
from seeds import Comparison, main

SETTINGS = {"per_device_train_batch_size": 8, "max_steps": 1000, "eval_steps": 100, "warmup_steps": 100}

NVFP4 = {"recipe": "nvfp4"}


def settings(folder: Path, seed: int) -> Mapping[str, Any]:
    return {
        **COMMON,
        **FULL,
        **SETTINGS,
        "model": str(folder / "model"),
        "train_seed": seed,
        "datasets": [{"path": str(folder / "train.jsonl"), "type": "text"}],
        "validation_datasets": [{"path": str(folder / "validation.jsonl"), "type": "text"}],
    }


FROM_SCRATCH = Comparison(
    name="nvfp4",
    mode="pt",
    settings=settings,
    variants={
        "bf16": {},
        "NVFP4": NVFP4,
        "without Hadamard": {**NVFP4, "no_fp4_hadamard": True},
        "without stochastic rounding": {**NVFP4, "no_fp4_stochastic_rounding": True},
        "without 4/6": {**NVFP4, "fp4_four_over_six": False},
        "weights in 1 x 16": {**NVFP4, "fp4_weight_blocks": "1x16"},
        "all blocks in FP4": {**NVFP4, "skip_quant_first_layers": 0, "skip_quant_last_layers": 0},
    },
    limits={"NVFP4": 1.0},
    heading="recipe",
    figure=("of the training loss", lambda run: run.trained),
)

ADAPTER = Comparison(
    name="nvfp4-lora",
    mode="sft",
    settings=qlora.settings,
    variants={"bf16": {}, "NVFP4": NVFP4},
    limits={"NVFP4": 1.0},
    heading="recipe",
    figure=("of the training loss", lambda run: run.trained),
)

if __name__ == "__main__":
    main(FROM_SCRATCH, sys.argv[1:], __doc__, lora=ADAPTER)
