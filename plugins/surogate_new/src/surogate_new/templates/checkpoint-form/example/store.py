"""Writes a model in the form to output/stored. It stands for one that somebody has published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from acme_plugin.plugin import ZERO
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

MODEL, STORED = Path("example/model"), Path("output/stored")


def store(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix, and the scales of its rows."""
    scales = (weight.abs().amax(dim=1) / (ZERO - 1)).clamp(min=1e-30)
    return ((weight / scales[:, None]).round() + ZERO).to(torch.uint8), scales


def main() -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL)
    tensors: dict[str, Tensor] = {}
    for name, weight in AutoModelForCausalLM.from_config(config).named_parameters():  # a tied head is no parameter
        tensors[name] = weight.detach()
        if weight.ndim == 2 and ".layers." in name:
            tensors[name], tensors[f"{name}_scale"] = store(weight.detach())
    STORED.mkdir(parents=True, exist_ok=True)
    for path in MODEL.iterdir():
        shutil.copy(path, STORED / path.name)
    content = json.loads((MODEL / "config.json").read_text())
    (STORED / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": "acme_toy"}}))
    save_file(tensors, STORED / "model.safetensors")


if __name__ == "__main__":
    main()
