"""The commands that load a saved adapter in other programs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from surogate_core.api import CAUSAL_LM, WRITES_TEXT
from surogate_core.api.peft import load_in_peft

from .options import LoraOptions

VLLM_RANK = 16
"""Largest rank that vLLM takes unless told otherwise."""


def commands(folder: Path, base_model: str, options: LoraOptions, **loading: Any) -> list[tuple[str, str]]:
    """(program, the line that loads the adapter), each to be copied; none for a program that cannot load it.

    `loading`: `loaded_by` and keyword arguments of a model that is no plain language model.

    vLLM refuses adapters with `modules_to_save`, reads none of experts in this form, and gives every projection the
    scale of `r` and `lora_alpha`, whatever the patterns say (vllm/lora/peft_helper.py): such an adapter is to be
    merged.
    """
    headed = loading.get("loaded_by", CAUSAL_LM) not in WRITES_TEXT
    whole = headed or options.lora_modules_to_save or options.lora_target_parameters
    is_plain = not (whole or options.lora_rank_pattern or options.lora_alpha_pattern)
    rank_saved = options.as_saved.lora_rank
    rank = f" --max-lora-rank {rank_saved}" if rank_saved > VLLM_RANK else ""
    name = shlex.quote(f"{folder.parent.name or 'adapter'}={folder}")
    peft, *others = load_in_peft(folder, base_model, **loading)
    vllm = ("vLLM", f"vllm serve {shlex.quote(base_model)} --enable-lora{rank} --lora-modules {name}")
    return [peft, *([vllm] if is_plain else []), *others]
