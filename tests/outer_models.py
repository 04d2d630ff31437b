"""Folders of outer models, as transformers writes them: a text model with a vision tower, all of it tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from end_to_end.product import VOCAB_SIZE, write_model

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HYBRID: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Sizes of the layers with a gated delta rule."""
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_PIXTRAL = {"model_type": "pixtral", **_VISION, "head_dim": 16, "image_size": 28}
_QWEN = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}

OUTER: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 16},
        "vision_config": {**_VISION, "image_size": 28},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": _PIXTRAL,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "text_config": TEXT
        | {
            "model_type": "ministral3",
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "vision_config": _PIXTRAL,
    },
    "qwen2_5_vl": {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        "vision_config": {**_QWEN, "fullatt_block_indexes": [0], "window_size": 28},
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [3, 3, 2]}},
        "vision_config": {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": {**_VISION, "image_size": 28},
    },
    "muse_glimmer": {
        "text_config": TEXT | {"num_hidden_layers": 5, "sliding_window": 16},
        "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
        "out_hidden_size": 128,
        "projector_hidden_size": 64,
    },
    "qwen3_5": {
        "text_config": TEXT | {"layer_types": ["linear_attention", "full_attention"], **HYBRID},
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
    },
    "qwen3_5_moe": {
        "text_config": {key: value for key, value in TEXT.items() if key != "intermediate_size"}
        | {"layer_types": ["linear_attention", "full_attention"], **HYBRID, **EXPERTS},
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
    },
}
"""{`model_type`, or what the text is: keys of its config.json}"""
STACKED = "qwen3_5_moe stacked"
"""The mixture as it is published: all experts of a layer are one tensor. transformers writes a matrix for each."""
OUTER[STACKED] = OUTER["qwen3_5_moe"]
_TYPES = {"ministral3": "mistral3", STACKED: "qwen3_5_moe"}

LOADER = "AutoModelForImageTextToText"
PROCESSOR = {"processor_class": "AProcessor", "image_mean": [0.5, 0.5, 0.5]}


def outer_config(kind: str, **changes: Any) -> Any:
    """Return the config of transformers, without towers for sound."""
    from transformers import AutoConfig

    return AutoConfig.for_model(_TYPES.get(kind, kind), **OUTER[kind] | changes)


def write_outer(folder: Path, kind: str, **changes: Any) -> Path:
    """Draw a model and write its files, with a tokenizer and the config of a processor. Return the folder."""
    import json

    import transformers

    write_model(folder)
    torch.manual_seed(0)
    model = getattr(transformers, LOADER).from_config(outer_config(kind, **changes), dtype=torch.float32)
    with torch.no_grad():  # norms of ones and biases of zeros hide what reads them
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if kind == STACKED:
        _stack_experts(folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def _stack_experts(path: Path) -> None:
    """Rewrite a file: a matrix for each expert and projection becomes two tensors of all experts of a layer."""
    from safetensors.torch import load_file, save_file

    held = load_file(path)
    of_experts = [name for name in held if ".mlp.experts." in name]
    for module in {name.split(".experts.")[0] + ".experts" for name in of_experts}:
        each = [
            {x: held.pop(f"{module}.{e}.{x}_proj.weight") for x in ("gate", "up", "down")}
            for e in range(EXPERTS["num_experts"])
        ]
        held[f"{module}.gate_up_proj"] = torch.stack([torch.cat((m["gate"], m["up"])) for m in each])
        held[f"{module}.down_proj"] = torch.stack([m["down"] for m in each])
    save_file(held, path, {"format": "pt"})
