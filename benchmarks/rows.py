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

FP32_8BIT = ("model_dtype=bf16", "master_dtype=bf16", "optimizer=adamw_8bit")
"""Full training in bf16 with gradients in fp32, the default, and moments in 8 bits."""

BF16_8BIT = (*FP32_8BIT, "param_grad_dtype=bf16")

AUTO = ("recompute=auto",)
"""For rows that fit an H200 and not an H100, on which they recompute as little as they must."""

LONG_ROW = ("recompute=true", "offload_residual=true", "offload_attention=true", "row_tiles=16384")
"""As docs/long-rows.md trains on a row of 131,072 tokens."""

FLOOR_GPU = "NVIDIA H200"


@dataclass(frozen=True)
class Row:
    """A configuration: `accumulate` micro-steps of `batch` rows of `seq_len` tokens, one document a row.

    lora: rank 16, alpha 32, on all seven linear layers; else full training. fp8: products of the blocks in FP8, and the
    same row on one GPU is measured in bf16 too. nf4: frozen matrices of the blocks in NF4. dpo: a row is a pair of
    documents, and their loss that of DPO against the model without its adapter. floor: tokens/s of the in-step floor on
    FLOOR_GPU, that is, if each op took the best time that it reaches inside a step at the power limit (measured on
    2026-11-20): products and attention at their sustained rates, element-wise traffic at 4.2 TB/s, and the optimizer.
    For LoRA without the work of the adapters.

    gpus: each has `batch` rows; zero_level: of all weights on several. alone: the same rows on one of the GPUs are
    measured too. base: config keys of our side in place of those that follow from the fields above; keys: more of them.
    checkpointed: the other side computes the activations of a layer again, or it would not fit. long: a step takes tens
    of seconds, so one is timed after one that is not.
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
    base: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    nf4: bool = False
    dpo: bool = False
    alone: bool = False
    checkpointed: bool = False
    long: bool = False

    @property
    def settings(self) -> tuple[str, ...]:
        """Config keys of our side. Attention may add in any order, as on the other side."""
        chosen = {(False, False): BF16, (True, False): LORA, (False, True): FP8, (True, True): FP8_LORA}
        level = (f"zero_level={self.zero_level}",) if self.zero_level > 1 else ()
        frozen = ("qlora_bnb=true",) if self.nf4 else ()
        pairs = ("loss=dpo", "sample_packing=true") if self.dpo else ()
        base = self.base or chosen[self.lora, self.fp8]
        return (*base, *frozen, *pairs, "deterministic=false", *level, *self.keys)


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
    Row("two-full-qwen3-8b-zero3", "qwen3-8b", 4, 2048, 2, gpus=2, zero_level=3, alone=True),
    Row("two-full-qwen3-8b-zero2", "qwen3-8b", 4, 2048, 2, gpus=2, zero_level=2, alone=True),
    Row("two-fp8-qwen3-8b", "qwen3-8b", 4, 2048, 2, fp8=True, gpus=2, zero_level=3, alone=True),
    Row("two-lora-qwen3-8b", "qwen3-8b", 2, 2048, 4, lora=True, gpus=2, alone=True),
    Row("two-full-qwen3-0.6b", "qwen3-0.6b", 16, 2048, 1, gpus=2, zero_level=2, alone=True),
    Row("two-full-qwen2.5-0.5b", "qwen2.5-0.5b", 32, 1024, 2, gpus=2, zero_level=2, alone=True),
    Row("two-full-qwen3-14b", "qwen3-14b", 2, 2048, 2, gpus=2, zero_level=3, base=BF16_8BIT, keys=AUTO),
    Row("two-full-qwen3-14b-fp32", "qwen3-14b", 2, 2048, 2, gpus=2, zero_level=3, base=FP32_8BIT, keys=AUTO),
    Row("two-fp8-lora-qwen3-32b", "qwen3-32b", 1, 2048, 4, lora=True, fp8=True, gpus=2, keys=AUTO),
    Row("two-nf4-lora-llama-70b", "llama-3.1-70b", 1, 4096, 4, lora=True, nf4=True, gpus=2, checkpointed=True),
    Row(
        "two-nf4-lora-llama-70b-recomputed",
        "llama-3.1-70b",
        1,
        4096,
        4,
        lora=True,
        nf4=True,
        gpus=2,
        keys=("recompute=true",),
        checkpointed=True,
    ),
    Row("two-lora-qwen3-30b-a3b", "qwen3-30b-a3b", 1, 2048, 4, lora=True, gpus=2),
    Row("two-dpo-qwen3-8b", "qwen3-8b", 2, 2048, 4, lora=True, dpo=True, gpus=2),
    Row("two-full-qwen3.5-9b", "qwen3.5-9b", 2, 2048, 4, gpus=2, zero_level=2),
    Row(
        "two-lora-llama-8b-128k",
        "llama-3.1-8b",
        1,
        131072,
        1,
        lora=True,
        gpus=2,
        keys=LONG_ROW,
        checkpointed=True,
        long=True,
    ),
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
