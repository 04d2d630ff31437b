"""The loss of LoRA on frozen weights in each format, against bf16.

    python benchmarks/convergence.py prepare work --text docs.jsonl --chat gsm8k.jsonl
    python benchmarks/convergence.py train work full bf16
    python benchmarks/qlora.py train work
    python benchmarks/qlora.py compare work --picture docs/qlora-loss.png

`train` fine-tunes the model of the run full bf16, 98M parameters, on questions and answers: six formats, three seeds of
the adapter and of the order of the data. The validation set is the same in all. See seeds.py for `--part` and
`compare`, whose last column is the difference of the loss before training.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convergence import COMMON, LORA
from seeds import Comparison, main

SETTINGS = {"learning_rate": 1e-3, "eval_steps": 30}
"""Besides LORA. At its learning rate, 4e-3, another algorithm for products alone moves a run by 0.6 %."""


def settings(folder: Path, seed: int) -> Mapping[str, Any]:
    fields = {"instruction_field": "question", "output_field": "answer"}
    return {
        **COMMON,
        **LORA,
        **SETTINGS,
        "model": str(folder / "full-bf16-1"),
        "train_seed": seed,
        "datasets": [{"path": str(folder / "chat.jsonl"), "type": "instruction", **fields}],
        "validation_split_ratio": 0.05,
    }


COMPARISON = Comparison(
    name="qlora",
    mode="sft",
    settings=settings,
    variants={
        "bf16": {},
        "FP8": {"qlora_fp8": True},
        "NF4": {"qlora_bnb": True, "qlora_bnb_double_quant": False},
        "NF4, double quantization": {"qlora_bnb": True},
        "FP4": {"qlora_fp4": True, "qlora_four_over_six": False},
        "FP4, 4/6": {"qlora_fp4": True},
    },
    limits={"FP8": 0.3, "NF4": 1.0, "NF4, double quantization": 1.0},
    heading="frozen weights",
    figure=("before training", lambda run: run.first),
)

if __name__ == "__main__":
    main(COMPARISON, sys.argv[1:], __doc__)
