"""PEFT's adapter format: `adapter_config.json` and `adapter_model.safetensors`. Torch is imported on use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api import Merge
from surogate_core.errors import ConfigError

from .options import ALL_LINEAR, LoraOptions, scale

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."  # PEFT's: the wrapper, and the model in it
_SUFFIX = ".weight"
_KINDS = (".lora_A", ".lora_B")

_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Keys of PEFT that change what an adapter computes -> the values that are built."""


# --------------------------------------------------------------------------------------------------------------- write


def save(params: Mapping[str, Tensor], folder: Path, base_model: str, options: LoraOptions) -> None:
    """Write an adapter that PEFT and vLLM load."""
    from safetensors.torch import save_file

    tensors = {f"{_PREFIX}{name}{_SUFFIX}": t.detach().cpu().contiguous() for name, t in params.items()}
    save_file(tensors, folder / TENSORS_FILE, metadata={"format": "pt"})
    config = _config(params, base_model, options)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config(params: Mapping[str, Tensor], base_model: str, options: LoraOptions) -> dict[str, Any]:
    targets: list[str] = list(options.lora_target_modules)
    if any(target.lower() in ALL_LINEAR for target in targets):
        targets = list(dict.fromkeys(name.rsplit(".", 2)[-2] for name in params))
    alpha = options.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": None,
        "inference_mode": True,
        "r": options.lora_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": options.lora_dropout,
        "use_rslora": options.lora_use_rslora,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
        "auto_mapping": None,
    }


# ---------------------------------------------------------------------------------------------------------------- read


def load(folder: Path, options: LoraOptions) -> dict[str, Tensor]:
    """The matrices of a saved adapter, by param name, to go on training them under the same options."""
    path = folder / CONFIG_FILE
    config = _read_config(folder)
    given = {
        "r": ("lora_rank", options.lora_rank),
        "lora_alpha": ("lora_alpha", options.lora_alpha),
        "use_rslora": ("lora_use_rslora", options.lora_use_rslora),
    }
    for theirs, (ours, value) in given.items():
        if config[theirs] != value:
            raise ConfigError(f"{path}: {theirs} is {config[theirs]}, but {ours} is {value}. Set {ours} to the first.")
    return _read_tensors(folder)


def merge(folder: Path) -> Merge:
    """For each projection of a saved adapter: W + scale * B A, summed in fp32, in the dtype of W."""
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    factor = scale(config["lora_alpha"], config["r"], config["use_rslora"])
    modules = {name.rpartition(".")[0] for name in tensors}
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for module in sorted(modules):
        pair = [tensors.get(module + kind) for kind in _KINDS]
        down, up = pair
        if down is None or up is None or down.shape[0] != up.shape[1]:
            raise ConfigError(f"{folder / TENSORS_FILE}: {module} has no lora_A [r, in] with a lora_B [out, r].")
        changes[f"{module}{_SUFFIX}"] = _change(f"{folder / TENSORS_FILE}: {module}", down, up, factor)
    return Merge(config["base_model_name_or_path"], changes)


def _change(place: str, down: Tensor, up: Tensor, factor: float) -> Callable[[Tensor], Tensor]:
    def merged(weight: Tensor) -> Tensor:
        shape = [up.shape[0], down.shape[1]]
        if list(weight.shape) != shape:
            raise ConfigError(f"{place} is of a weight {shape}; the base's is {list(weight.shape)}. Name its own base.")
        return (weight.float() + factor * (up.float() @ down.float())).to(weight.dtype)

    return merged


def _read_config(folder: Path) -> dict[str, Any]:
    """The parsed config with the keys that decide what an adapter computes, all of them right."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: holds no {CONFIG_FILE}: not a LoRA adapter. Name the folder that has it."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}). Save the adapter again.") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type must be LORA: other adapters are not built.")
    for key, legal in _MUST_BE.items():
        if config.get(key) not in legal:
            raise ConfigError(f"{path}: {key} is {config[key]!r}; not built, must be {legal[0]!r}.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{path}: r must be a whole number of at least 1 (got {rank!r}).")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ConfigError(f"{path}: lora_alpha must be a number (got {alpha!r}).")
    base = config.get("base_model_name_or_path")
    return {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": bool(config.get("use_rslora")),
        "base_model_name_or_path": base if isinstance(base, str) else "",
    }


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / TENSORS_FILE
    try:
        stored = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{folder}: holds no {TENSORS_FILE}. Pickled adapters are never read.") from None
    except SafetensorError as error:
        raise ConfigError(f"{path}: is truncated or corrupt ({error}). Save the adapter again.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
    tensors = {name.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor for name, tensor in stored.items()}
    unknown = [name for name, tensor in tensors.items() if not name.endswith(_KINDS) or tensor.dim() != 2]
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]} is not a matrix of a LoRA adapter of linear projections.")
    return tensors
