"""A saved adapter in the hands of others: loaded once by PEFT, and the commands that load it. Imports PEFT on use."""

from __future__ import annotations

import shlex
from pathlib import Path

from .options import LoraOptions

VLLM_RANK = 16
"""Largest rank that vLLM takes unless told otherwise."""


def check(folder: Path, base_dir: Path) -> None:
    """Load the adapter in PEFT, onto its base without the base's data. Raises ValueError for tensors that do not fit.

    PEFT itself raises for another shape, or files that it cannot read.
    """
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = PeftConfig.from_pretrained(str(folder))
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_dir, local_files_only=True))
        model = PeftModel(base, config)
    report = model.load_adapter(str(folder), "default", low_cpu_mem_usage=True)
    for what, names in (("lacks", report.missing_keys), ("holds, unexpectedly,", report.unexpected_keys)):
        if names:
            raise ValueError(f"it {what} {names[0]} ({len(names)} such tensors)")
    if (folder / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(folder, local_files_only=True)


def commands(folder: Path, base_model: str, options: LoraOptions) -> list[tuple[str, str]]:
    """(program, the line that loads the adapter), each to be copied; none for a program that cannot load it.

    vLLM refuses adapters with `modules_to_save`, and gives every projection the scale of `r` and `lora_alpha`, whatever
    the patterns say (vllm/lora/peft_helper.py): such an adapter is to be merged.
    """
    is_plain = not (options.lora_modules_to_save or options.lora_rank_pattern or options.lora_alpha_pattern)
    rank = f" --max-lora-rank {options.lora_rank}" if options.lora_rank > VLLM_RANK else ""
    name = shlex.quote(f"{folder.parent.name or 'adapter'}={folder}")
    model_args = shlex.quote(f"pretrained={base_model},peft={folder}")
    return [
        ("PEFT", f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})"),
        *(
            [("vLLM", f"vllm serve {shlex.quote(base_model)} --enable-lora{rank} --lora-modules {name}")]
            if is_plain
            else []
        ),
        ("lm-eval", f"lm_eval --model hf --model_args {model_args} --tasks gsm8k"),
    ]
