"""Draws the runs of which `recorded.json` holds what a change of the core must leave as it is.

Each axis is a choice of keys. Of every two axes the draw has as many pairs of choices as possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covering import drawn
from models.supported import FAMILIES
from models.test_supported import config_of as tiny

SEED = 17
COUNT = 68
LAYERS = 3
VOCABULARY = 2048

Keys = Mapping[str, Any]

LORA: Keys = {"lora": True, "lora_rank": 4}
DORA: Keys = {"adapter": "dora", "dora_rank": 4}
TRAINED: Mapping[str, Keys] = {
    "all weights": {},
    "lora": LORA | {"lora_dropout": 0.1},
    "lora and embedding": LORA | {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["embed_tokens", "norm"]},
    "pissa": LORA | {"lora_init": "pissa"},
    "dora": DORA,
    "lora on nf4": LORA | {"qlora_bnb": True},
    "lora on nf4 everywhere": LORA | {"qlora_bnb": True, "quantize_embedding": True},
    "dora on nf4": DORA | {"qlora_bnb": True},
    "lora on fp8": LORA | {"qlora_fp8": True, "qlora_block_size": 64},
    "lora on fp4": LORA | {"qlora_fp4": True},
}
RECIPES: Mapping[str, Keys] = {
    "fp32": {"model_dtype": "fp32"},
    "bf16": {"master_dtype": "fp32"},
    "bf16 rounded": {"param_grad_dtype": "bf16"},
    "fp8": {"recipe": "fp8-hybrid", "fp8_amax_history": 4},
    "fp8 reported": {"recipe": "fp8-hybrid", "numerics_report_steps": 2, "skip_quant_last_layers": 1},
    "nvfp4": {"recipe": "nvfp4", "fp4_backend": "emulate"},
}
OPTIMIZERS: Mapping[str, Keys] = {
    "adamw": {"optimizer": "adamw"},
    "8 bits": {"optimizer": "adamw_8bit"},
    "normuon": {"optimizer": "normuon"},
}
LOSSES: Mapping[str, Keys] = {
    "next token": {},
    "z-loss": {"loss": "tokens", "tokens_z_loss": 1e-3, "tokens_label_smoothing": 0.1},
    "distillation": {"loss": "distillation", "distillation_top_k": 6},
    "dpo": {"loss": "dpo"},
    "kto": {"loss": "kto"},
    "orpo": {"loss": "orpo"},
    "reward": {"loss": "reward"},
}
RANKS: Mapping[str, tuple[int, Keys]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "3 ranks, level 2": (3, {"zero_level": 2}),
    "2 ranks, level 3": (2, {"zero_level": 3}),
    "4 ranks, weights": (4, {"shard_weights": True}),
}
RECOMPUTED: Mapping[str, Keys] = {
    "kept": {"recompute": False},
    "norms": {"recompute": False, "recompute_rmsnorm": True, "recompute_swiglu": True},
    "attention": {"recompute": False, "recompute_att": True},
    "recomputed": {"recompute": True},
}
OFFLOADED: Mapping[str, Keys] = {
    "on the device": {},
    "states held": {"offload_optimizer": True},
    "masters held": {"offload_optimizer": True, "offload_master": True},
    "states used there": {"offload_optimizer": True, "use_zero_copy": True},
    "gradients held": {"offload_grads": True},
    "weights held": {"offload_weights": 1},
    "quants held": {"offload_quants": True},
    "residual held": {"offload_residual": True},
}
STEPS: Mapping[str, Keys] = {
    "1 micro-step": {"gradient_accumulation_steps": 1, "sample_packing": False},
    "2 micro-steps": {"gradient_accumulation_steps": 2, "attn_bwd_chunks": 2},
    "3 micro-steps": {"gradient_accumulation_steps": 3, "lmhead_chunks": 2},
}
ADDED = ("ministral3", "qwen2_moe", "glm4_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gpt_oss")
ADDED += ("glm4_moe_lite", "deepseek_v3")
"""Families that came after the record: a draw with them is another one. Take them in when it is made anew."""
DEVICES = ("h200", "b200", "rtx4090", "cpu")
AXES: Mapping[str, tuple[str, ...]] = {
    "family": tuple(family.variant for family in FAMILIES if family.variant not in ADDED),
    "trained": (*TRAINED, "all weights", "all weights", "lora"),
    "recipe": tuple(RECIPES),
    "optimizer": tuple(OPTIMIZERS),
    "loss": tuple(LOSSES),
    "ranks": tuple(RANKS),
    "recomputed": tuple(RECOMPUTED),
    "offloaded": tuple(OFFLOADED),
    "steps": tuple(STEPS),
    "device": DEVICES,
}
SIZES: Keys = {"sequence_len": 64, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "warmup_steps": 1}


@dataclass(frozen=True)
class DrawnRun:
    """A run of a tiny model. name: its choices. keys: without paths. device: that its plan is for."""

    number: int
    name: str
    family: str
    loss: str
    ranks: int
    device: str
    keys: Keys

    @property
    def needs_weights(self) -> bool:
        """Whether it starts from weights of a model."""
        return "lora" in self.keys or "adapter" in self.keys

    @property
    def trained(self) -> bool:
        """Whether its losses are recorded. Many threads take long."""
        return self.number % 2 == 0 and self.ranks < 4

    @property
    def resumed(self) -> bool:
        return self.number % 4 == 0 or self.ranks == 2

    @property
    def quick(self) -> bool:
        """Whether its plan is part of the quick tests. Losses of one rank are, too."""
        return self.number % 3 == 0


def draw() -> list[DrawnRun]:
    """Return the runs, also those that are refused."""
    return [_run(number, one) for number, one in enumerate(drawn(AXES, COUNT, SEED))]


def _run(number: int, one: Mapping[str, str]) -> DrawnRun:
    ranks, divided = RANKS[one["ranks"]]
    loss, trained = LOSSES[one["loss"]], TRAINED[one["trained"]]
    tables = (RECIPES, OPTIMIZERS, RECOMPUTED, OFFLOADED, STEPS)
    axes = ("recipe", "optimizer", "recomputed", "offloaded", "steps")
    keys = {**SIZES, **trained, **loss, **divided}
    for axis, table in zip(axes, tables, strict=True):
        keys |= table[one[axis]]
    keys |= _served(one, keys)
    if one["loss"] in ("dpo", "kto") and not trained:
        keys["reference"] = "frozen" if number % 2 else "cached"
    return DrawnRun(
        number, f"{number:02}: {', '.join(one.values())}", one["family"], one["loss"], ranks, one["device"], keys
    )


def _served(one: Mapping[str, str], keys: Keys) -> Keys:
    """Return what else a choice needs so that most runs are not refused."""
    found: dict[str, Any] = {}
    if "offload_grads" in keys and one["ranks"] != "1 rank":
        found["shard_gradients"] = True
    if "offload_master" in keys:
        whole = one["trained"] == "all weights"
        found |= {"model_dtype": "bf16", "master_dtype": "fp32"} if whole else {"offload_master": False}
    if "offload_weights" in keys and " on " in one["trained"]:
        found |= {"offload_weights": False, "offload_quants": True}
    if "offload_quants" in keys and " on " not in one["trained"] and "recipe" not in keys:
        found |= {"offload_weights": True, "offload_quants": False}
    if one["loss"] == "kto":
        found["sample_packing"] = True  # it also reads each document beside the others of its row
    if "lora_modules_to_save" in keys and tiny(one["family"], LAYERS)["tie_word_embeddings"]:
        found["lora_modules_to_save"] = ["embed_tokens", "lm_head"]
    return found


def config_of(family: str) -> dict[str, Any]:
    return tiny(family, LAYERS) | {"vocab_size": VOCABULARY}
