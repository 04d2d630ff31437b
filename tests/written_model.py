"""A tiny model that writes text, and an adapter on it, as transformers and PEFT save them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from end_to_end.product import EXAMPLES, MODEL_CONFIG, write_model


def write_weights(folder: Path, *, template: bool = True, seed: int = 0, **config: Any) -> Path:
    """Write a Qwen3 of two layers with random weights large enough to have a favourite token, and its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_model(folder)
    if template:
        shutil.copy(EXAMPLES / "tiny-qwen3/chat_template.jinja", folder)
    named = {key: value for key, value in MODEL_CONFIG.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**named, "initializer_range": 0.3, **config}))
    model.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, base: Path) -> Path:
    """Write a LoRA adapter of a base that changes what it writes."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(20)
    adapted.save_pretrained(str(folder))
    return folder
