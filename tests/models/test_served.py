"""Every op has a compiled kernel, of every architecture that the packages build, in the runs that are offered.

A plan needs no GPU: it chooses the kernel of each op by dtypes, sizes and device. Sizes are published ones, with few
blocks: those of the first of the fifty models (`docs/reference/fifty.toml`) that has the class and says its sizes, or
else of the model that transformers' config has by default.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from surogate import run
from surogate.runs.plan import plan_run
from surogate_core.assembly.resolve import unserved_ops
from surogate_core.machine.devices import device
from surogate_core.plugins.discovery import load_registry

REFERENCE = str(Path(__file__).parents[2] / "docs/reference")
sys.path.insert(0, REFERENCE)
try:
    fifty = importlib.import_module("fifty")
finally:
    sys.path.remove(REFERENCE)

BLOCKS = 6
"""Gemma 3 has every kind of block in six, the other families in four."""
LACKING = {"Glm4MoeForCausalLM": {"head_dim": 128}}
"""Keys of a published config.json that transformers' default lacks."""

WEIGHTS: dict[str, dict[str, Any]] = {
    "all": {"lora": False, "param_grad_dtype": "bf16"},
    "all in fp32": {"lora": False, "param_grad_dtype": "fp32"},
    "lora": {"lora": True},
    "nf4": {"lora": True, "qlora_bnb": True},
    "fp8": {"lora": True, "qlora_fp8": True},
    "fp4": {"lora": True, "qlora_fp4": True},
}
"""What is trained: all weights, with gradients in bf16 or fp32; or LoRA, on a base in bf16 or a weight format."""
QUICK = (
    ("h100", "bf16", "all"),
    ("h100", "fp8-hybrid", "all"),
    ("h100", "nvfp4", "nf4"),
)
RUNS = (
    *QUICK,
    *product(["h100"], ["bf16", "fp8-hybrid", "nvfp4"], WEIGHTS),
    *product(["a100"], ["bf16"], WEIGHTS),
    *product(["rtx4090"], ["fp8-hybrid"], WEIGHTS),
    *product(["b200", "rtx5090"], ["bf16", "nvfp4"], WEIGHTS),
)


def built() -> dict[str, str]:
    """Return the architectures that the packages build, and the names of their families."""
    models = (item.definition for item in load_registry().provided if item.kind == "model")
    return {architecture: model.name for model in models for architecture in model.architectures}


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config", config)
    return text


@cache
def config_json(architecture: str, family: str) -> dict[str, Any]:
    """Return a config.json of few blocks, whose weights are not quantized."""
    listed = (m.config_json for m in fifty.models() if m.architecture == architecture)
    config = next((c for c in listed if "num_hidden_layers" in text_of(c)), None)
    if config is None:
        config = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
        config |= LACKING.get(architecture, {})
    text = text_of(config)
    layers = text["num_hidden_layers"]
    few = {key: x[:BLOCKS] for key, x in text.items() if isinstance(x, list) and len(x) == layers}
    text |= few | {"num_hidden_layers": min(layers, BLOCKS)}
    return {key: x for key, x in config.items() if key != fifty.QUANTIZATION} | {"architectures": [architecture]}


@pytest.mark.parametrize(
    ("gpu", "recipe", "weights"),
    [
        pytest.param(*run, id=", ".join(run), marks=() if run in QUICK else pytest.mark.slow)
        for run in dict.fromkeys(RUNS)
    ],
)
def test_every_op_of_every_architecture_has_a_kernel(gpu: str, recipe: str, weights: str, tmp_path: Path) -> None:
    sizes = {"sequence_len": 1024, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    keys = {"model": str(tmp_path), "recipe": recipe, "recompute": True, **sizes, **WEIGHTS[weights]}
    unserved = {}
    for architecture, family in built().items():
        (tmp_path / "config.json").write_text(json.dumps(config_json(architecture, family)))
        plan = plan_run(run.open_run(run.load(keys)), device(gpu), 1)
        if missing := unserved_ops(plan.kernels):
            unserved[architecture] = missing
    assert not unserved, "\n".join(f"{architecture}: {missing}" for architecture, missing in unserved.items())
