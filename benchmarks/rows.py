"""The rows that `compare.py` measures."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

MODELS = Path(__file__).parent / "models"

ADAMW = ("optimizer=adamw", "optimizer_state_dtype=bf16")
"""As on the other side."""

BF16 = ("model_dtype=bf16", "master_dtype=bf16", "param_grad_dtype=bf16", *ADAMW)
"""Full training in bf16: weights, gradients and both moments."""

LORA = ("model_dtype=bf16", "optimizer=adamw")

FP8 = ("recipe=fp8-hybrid", "master_dtype=bf16", "param_grad_dtype=bf16", *ADAMW)
"""The same with products of the blocks in FP8."""

FP8_LORA = ("recipe=fp8-hybrid", "optimizer=adamw")

FLOOR_GPU = "NVIDIA H200"


@dataclass(frozen=True)
class Row:
    """A configuration: `accumulate` micro-steps of `batch` rows of `seq_len` tokens, one document a row.

    lora: rank 16, alpha 32, on all seven linear layers; else full training. fp8: products of the blocks in FP8, and the
    same row in bf16 is measured too. floor: tokens/s of the in-step floor on FLOOR_GPU, that is, if each op took the
    best time that it reaches inside a step at the power limit (measured on 2026-11-20): products and attention at their
    sustained rates, element-wise traffic at 4.2 TB/s, and the optimizer. For LoRA without the work of the adapters.
    gpus: each has `batch` rows; zero_level: of all weights on several. keys: more of our side.
    """

    name: str
    model: str
    batch: int
    seq_len: int
    accumulate: int
    lora: bool = False
    fp8: bool = False
    floor: float | None = None
    gpus: int = 1
    zero_level: int = 1
    keys: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Config keys of our side. Attention may add in any order, as on the other side."""
        chosen = {(False, False): BF16, (True, False): LORA, (False, True): FP8, (True, True): FP8_LORA}
        level = (f"zero_level={self.zero_level}",) if self.zero_level > 1 else ()
        return (*chosen[self.lora, self.fp8], "deterministic=false", *level, *self.keys)


ROWS = (
    Row("lora-qwen3-0.6b", "qwen3-0.6b", 2, 2048, 4, lora=True, floor=145e3),
    Row("lora-qwen3-1.7b", "qwen3-1.7b", 2, 2048, 4, lora=True, floor=67.7e3),
    Row("lora-qwen3-4b", "qwen3-4b", 2, 2048, 4, lora=True, floor=30.4e3),
    Row("lora-qwen3-8b", "qwen3-8b", 2, 2048, 4, lora=True, floor=18.5e3),
    Row("full-qwen2.5-0.5b", "qwen2.5-0.5b", 32, 1024, 4, floor=166e3),
    Row("full-qwen2.5-1.5b", "qwen2.5-1.5b", 32, 1024, 2, floor=60.9e3),
    Row("full-qwen2.5-7b", "qwen2.5-7b", 8, 1024, 4, floor=14.8e3),
    Row("full-llama-3.2-1b", "llama-3.2-1b", 32, 1024, 2, floor=77.1e3),
    Row("full-qwen3-0.6b", "qwen3-0.6b", 16, 2048, 2, floor=120e3),
    Row("full-qwen3-8b", "qwen3-8b", 4, 2048, 4, floor=13.1e3),
    Row("fp8-qwen2.5-0.5b", "qwen2.5-0.5b", 32, 1024, 4, fp8=True, floor=218e3),
    Row("fp8-qwen2.5-1.5b", "qwen2.5-1.5b", 32, 1024, 2, fp8=True, floor=93.6e3),
    Row("fp8-qwen2.5-7b", "qwen2.5-7b", 8, 1024, 4, fp8=True, floor=25.2e3),
    Row("fp8-qwen3-8b", "qwen3-8b", 4, 2048, 4, fp8=True, floor=21.6e3),
    Row("fp8-lora-qwen3-0.6b", "qwen3-0.6b", 2, 2048, 4, lora=True, fp8=True),
    Row("fp8-lora-qwen3-4b", "qwen3-4b", 2, 2048, 4, lora=True, fp8=True),
    Row("fp8-lora-qwen3-8b", "qwen3-8b", 2, 2048, 4, lora=True, fp8=True),
    Row("lora-mistral-7b", "mistral-7b", 2, 2048, 4, lora=True),
    Row("full-mistral-7b", "mistral-7b", 2, 2048, 4),
    Row("lora-gemma-3-4b", "gemma-3-4b", 2, 2048, 4, lora=True),
    Row("full-gemma-3-4b", "gemma-3-4b", 2, 2048, 4),
    Row("lora-qwen3-30b-a3b", "qwen3-30b-a3b", 1, 2048, 4, lora=True),
    Row("two-full-qwen2.5-0.5b", "qwen2.5-0.5b", 32, 1024, 2, gpus=2, zero_level=2),
    Row("two-full-qwen3-0.6b", "qwen3-0.6b", 16, 2048, 1, gpus=2, zero_level=2),
    Row("two-full-qwen3-8b-zero2", "qwen3-8b", 4, 2048, 2, gpus=2, zero_level=2),
    Row("two-full-qwen3-8b-zero3", "qwen3-8b", 4, 2048, 2, gpus=2, zero_level=3),
    Row("two-fp8-qwen3-8b", "qwen3-8b", 4, 2048, 2, fp8=True, gpus=2, zero_level=3),
    Row("two-full-qwen3-14b", "qwen3-14b", 2, 2048, 2, gpus=2, zero_level=3, keys=("optimizer=adamw_8bit",)),
    Row("two-lora-qwen3-8b", "qwen3-8b", 2, 2048, 4, lora=True, gpus=2),
    Row("two-fp8-lora-qwen3-32b", "qwen3-32b", 1, 2048, 4, lora=True, fp8=True, gpus=2),
    Row("two-lora-qwen3-30b-a3b", "qwen3-30b-a3b", 1, 2048, 4, lora=True, gpus=2),
)


def chosen(patterns: list[str]) -> list[Row]:
    """Return the rows whose name matches one of `patterns` ("lora-*"), in the order of the patterns; none: all of
    one GPU.

    Raises ValueError for a pattern that matches none.
    """
    if not patterns:
        return [row for row in ROWS if row.gpus == 1]
    found: dict[Row, None] = {}
    for pattern in patterns:
        rows = [row for row in ROWS if fnmatch(row.name, pattern)]
        if not rows:
            raise ValueError(f"no row is named {pattern}. Rows: {', '.join(row.name for row in ROWS)}")
        found.update(dict.fromkeys(rows))
    return list(found)
