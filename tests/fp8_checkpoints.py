"""Checkpoints in FP8 as they are published, written without the code that reads them, and twins with their values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SCALE = "_scale_inv"
E4M3_MAX = 448.0


def blocks(weight: Tensor, block: Sequence[int] | None) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Yield (place in the grid of scales, the elements) of each block of a matrix; of None, all of it."""
    height, width = block or weight.shape
    for i, row in enumerate(range(0, weight.shape[0], height)):
        for j, column in enumerate(range(0, weight.shape[1], width)):
            yield (i, j), (slice(row, row + height), slice(column, column + width))


def to_fp8(weight: Tensor, block: Sequence[int] | None, scales: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a matrix. The scale of a whole matrix has no dimension."""
    height, width = block or weight.shape
    grid = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width), dtype=scales)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for place, part in blocks(weight, block):
        grid[place] = weight[part].abs().max() / E4M3_MAX * (1 if scales == torch.float32 else 1.5)
        codes[part] = (weight[part] / grid[place].float()).clamp(-E4M3_MAX, E4M3_MAX).to(codes.dtype)
    return codes, grid if block else grid.reshape(())


def of_fp8(codes: Tensor, scales: Tensor, block: Sequence[int] | None) -> Tensor:
    """Return code x scale, by definition: one block after another, in fp32."""
    weight, grid = torch.empty(codes.shape), scales.float().reshape(1, 1) if block is None else scales.float()
    for place, part in blocks(weight, block):
        weight[part] = codes[part].float() * grid[place]
    return weight


def quantization_config(block: Sequence[int] | None) -> dict[str, Any]:
    kept = {"modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    if block is None:
        return {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, **kept}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block), **kept}


def write_fp8(
    source: Path,
    folder: Path,
    block: Sequence[int] | None,
    scales: torch.dtype = torch.float32,
    files: int = 2,
    *,
    towers: bool = False,
) -> Path:
    """Write the model of `source` with the matrices of its blocks in FP8, to several files: scales are in the last.

    towers: also those of a vision tower
    """
    stored: dict[str, Tensor] = {}
    beside: dict[str, Tensor] = {}
    for name, tensor in tensors_of(source).items():
        if tensor.ndim == 2 and ".layers." in name and ("vision" not in name or towers):
            stored[name], beside[name + SCALE] = to_fp8(tensor.float(), block, scales)
            if block is None:
                beside[name.replace(".weight", ".activation_scale")] = torch.tensor(0.02)
        else:
            stored[name] = tensor.bfloat16()
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization_config(block)}
    copied(source, folder, config | {"dtype": "bfloat16"})
    names = sorted(stored)
    shards = [{name: stored[name] for name in names[i :: files - 1]} for i in range(files - 1)] if files > 1 else []
    write_shards(folder, [*shards, beside] if files > 1 else [stored | beside])
    return folder


def write_twin(quantized: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the values of an FP8 checkpoint as an ordinary model: rounded from fp32 to `dtype`, once."""
    config = json.loads((quantized / "config.json").read_text())
    block = config.pop("quantization_config")["weight_block_size"]
    copied(quantized, folder, config)
    tensors = tensors_of(quantized)
    values = {
        name: of_fp8(tensor, tensors[name + SCALE], block).to(dtype) if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith((SCALE, ".activation_scale"))
    }
    save_file(values, folder / "model.safetensors")
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def write_shards(folder: Path, shards: Sequence[dict[str, Tensor]]) -> None:
    """Write the weights of a model, and their index if there are several files."""
    for path in folder.glob("model*safetensors*"):
        path.unlink()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return
    named = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
    for name, shard in named.items():
        save_file(shard, folder / name)
    weight_map = {tensor: name for name, shard in named.items() for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def copied(source: Path, folder: Path, config: dict[str, Any]) -> None:
    """Copy the files of a model but its weights, with another config.json."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if ".safetensors" not in path.name and path.is_file():
            shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config))
