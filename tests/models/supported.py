"""What tests run of every family. The table of families in `docs/reference/supported.md` is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """A row of the table.

    variant: in `models/test_parity.py` and `test_hf.py`. templates: those that `data/test_published_templates.py` and
    `data/test_family_templates.py` mask, and those of `qwen_templates.py`.
    """

    name: str
    variant: str
    templates: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A run that `models/test_supported.py` makes of each family, and its columns of the table.

    axes: what differs from full training in bf16 with AdamW on one rank, of `sharding/test_combinations.py`.
    """

    columns: tuple[str, ...]
    axes: Mapping[str, str] = field(default_factory=dict)


FAMILIES = (
    Family("Llama", "llama", ("llama-2", "llama-3", "llama-3.1")),
    Family("Qwen2.5", "qwen2", ("qwen2.5",)),
    Family("Qwen3", "qwen3", ("qwen3",)),
    Family("SmolLM3", "smollm3", ("smollm3", "SmolLM3")),
    Family("Mistral", "mistral", ("mistral-v1", "mistral-v3", "mistral-v3-tekken", "mistral-v7", "mistral-small-3.2")),
    Family("Ministral", "ministral", ("mistral-v3-tekken",)),
    Family("Ministral 3", "ministral3", ("Ministral 3",)),
    Family("Gemma 2", "gemma2", ("gemma-2",)),
    Family("Gemma 3", "gemma3_text", ("Gemma 3",)),
    Family("OLMo 2", "olmo2", ("OLMo 2, OLMoE",)),
    Family("OLMo 3", "olmo3", ("OLMo 3",)),
    Family("Phi-3, Phi-4", "phi3", ("phi-3", "phi-3.5", "phi-4", "Phi-4-mini")),
    Family("Qwen3-MoE", "qwen3_moe", ("qwen3", "Qwen3-Coder")),
    Family("Qwen2-MoE", "qwen2_moe", ("qwen2.5",)),
    Family("OLMoE", "olmoe", ("OLMo 2, OLMoE",)),
    Family("GLM-4-MoE", "glm4_moe", ()),
    Family("GLM-4.7-Flash", "glm4_moe_lite", ()),
    Family("DeepSeek-V3", "deepseek_v3", ()),
    Family("gpt-oss", "gpt_oss", ("gpt-oss",)),
    Family("Qwen3.5", "qwen3_5_text", ("Qwen3.5", "Qwen3.6", "Qwen3.8")),
    Family("Qwen3.5, mixtures", "qwen3_5_moe_text", ("Qwen3.5", "Qwen3.6")),
    Family("Qwen3-Next", "qwen3_next", ()),
)

RUNS = (
    Run(("all weights", "`fp8-hybrid`", "offloading"), {"recipe": "fp8", "offload": "optimizer"}),
    Run(("all weights", "`nvfp4`", "offloading"), {"recipe": "nvfp4", "offload": "master"}),
    Run(("LoRA", "`loss: dpo`", "offloading"), {"base": "lora", "offload": "weights"}),
    Run(("LoRA on NF4", "offloading"), {"base": "nf4", "offload": "quants"}),
    Run(("LoRA on FP8", "offloading"), {"base": "fp8 tiles", "offload": "grads"}),
    Run(("LoRA on NVFP4", "offloading"), {"base": "fp4", "offload": "residual"}),
)

EVERY = ("parity", "files")
"""Columns of tests of every family: `models/test_parity.py` and `test_hf.py`."""
DIVIDED = "`zero_level: 3`"
"""The column of the run on two ranks."""
