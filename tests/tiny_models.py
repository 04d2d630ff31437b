"""The models of benchmarks/, made tiny, of the same family."""

from __future__ import annotations

import json
from pathlib import Path

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}


def write_tiny(name: str, folder: Path, blocks: int = 2) -> Path:
    """Write the config of a model of benchmarks/ with small sizes to `folder / name`, and return that."""
    config = json.loads((MODELS / name / "config.json").read_text())
    config |= {key: value for key, value in SMALL.items() if key in config}
    config["num_hidden_layers"] = blocks
    if "full_attention_interval" in config:
        config |= {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * (blocks // 2)}
    if "mrope_section" in config.get("rope_parameters", {}):
        config["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(config))
    return folder / name
