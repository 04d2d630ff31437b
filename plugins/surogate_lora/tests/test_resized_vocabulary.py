"""Adapters whose base got more rows of tokens are refused with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.api import ConfigError
from surogate_core.api.peft import write_peft
from surogate_lora.files import merge

EMBEDDING = "model.embed_tokens.weight"


def adapter(folder: Path, **fields: Any) -> Path:
    module = "model.layers.0.mlp.up_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(2, 4), f"{module}.lora_B.weight": torch.ones(6, 2)}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
    write_peft(folder, {**tensors, EMBEDDING: torch.ones(11, 4)}, {**config, **fields})
    return folder


def test_a_resized_embedding_beside_an_adapter_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is neither .* new vocabulary .* [Mm]erge .* PEFT"):
        merge(adapter(tmp_path))


def test_a_base_that_was_not_resized_is_refused_with_the_call_that_resizes_it(tmp_path: Path) -> None:
    change = merge(adapter(tmp_path, modules_to_save=["embed_tokens"])).changes[EMBEDDING]
    with pytest.raises(ConfigError, match=r"is \[11, 4\]; the base's is \[9, 4\]. .*resize_token_embeddings\(11\)"):
        change(torch.ones(9, 4))
    with pytest.raises(ConfigError, match=r"is \[11, 4\]; the base's is \[11, 5\]. Name its own base"):
        change(torch.ones(11, 5))
