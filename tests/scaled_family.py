"""A plugin of one file, and the model of transformers that it trains: Qwen3 whose last hidden state is scaled, channel
by channel. The scale is in fp32 whatever the dtype of the run. transformers has it as a buffer and does not train it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate_core.api import BatchInputs, Builder, Head, HFTensor, Init, OpDef, OutSpec, WeightMap, provides
from surogate_models.qwen3 import QWEN3

SUROGATE_API = {"ops": 1, "models": 1}
SCALE = "scale"
"""The tensor, in checkpoints, in transformers and as a param."""


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return (x.to(scale.dtype) * scale).to(x.dtype)


def build(b: Builder, dims: Any, batch: BatchInputs) -> Head:
    head = QWEN3.build(b, dims, batch)
    return replace(head, x=b.apply("test_scaled", head.x, b.param(SCALE, (dims.d_model,), Init(kind="ones"), "fp32")))


OP = OpDef(
    kind="test_scaled",
    infer=lambda ins, attrs: [OutSpec("scaled", ins[0].shape, ins[0].dtype)],
    reference=f"{__name__}:scaled",
)
MODEL = replace(
    QWEN3,
    name="scaled",
    architectures=("ScaledForCausalLM",),
    model_types=("scaled",),
    build=build,
    weights=lambda dims: [*QWEN3.weights(dims), WeightMap(SCALE, (HFTensor(SCALE, (dims.d_model,)),))],
)
surogate_ops = provides([OP])
surogate_models = provides([MODEL])


def in_transformers() -> None:
    """Register the model in transformers, once."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    class ScaledConfig(Qwen3Config):  # type: ignore[misc]
        model_type = "scaled"

    class ScaledForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]
        config_class = ScaledConfig
        _keep_in_fp32_modules_strict = (SCALE,)

        def __init__(self, config: ScaledConfig) -> None:
            super().__init__(config)
            self.register_buffer(SCALE, torch.ones(config.hidden_size, dtype=torch.float32))
            self.lm_head.register_forward_pre_hook(lambda module, args: (scaled(args[0], self.scale),))

    AutoConfig.register("scaled", ScaledConfig, exist_ok=True)
    AutoModelForCausalLM.register(ScaledConfig, ScaledForCausalLM, exist_ok=True)


def scale_model(folder: Path) -> Tensor:
    """Make a Qwen3 in a folder one of this family, with values that bf16 cannot hold. Return its scale."""
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    own = {"architectures": list(MODEL.architectures), "model_type": "scaled"}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    scale = 1 + 0.3 * torch.rand(config["hidden_size"], generator=torch.Generator().manual_seed(0))
    save_file({**load_file(folder / "model.safetensors"), SCALE: scale}, folder / "model.safetensors")
    return scale
