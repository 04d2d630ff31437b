"""A LoRA adapter of PEFT as a GGUF file that llama.cpp adds to one of its base (`--lora`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
from safetensors import safe_open
from torch import Tensor

from surogate_core.api import ConfigError, ExportContext

from .families import Family, family_of, read_config
from .hyperparameters import ropes_of
from .tensors import Target, targets_of, text_name
from .values import FORMS
from .vocabulary import read_json
from .writer import Prepared, announce

KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
MERGE = "Merge it: --format gguf."


def prepare(context: ExportContext, path: Path | None = None) -> Prepared:
    """Return all of a file but its numbers. Raises ConfigError for an adapter that llama.cpp does not load."""
    folder = context.adapter
    assert folder is not None
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: has no {name}; the format is for adapters of PEFT. {MERGE}")
    settings, config = read_json(folder / "adapter_config.json"), read_config(context.config)
    check_settings(folder, settings)
    text = config.get_text_config()
    family = family_of(text)
    of_base = base_targets(context, config, family)
    file = safe_open(str(folder / "adapter_model.safetensors"), "pt")
    targets, scales, alpha = list[Target](), dict[str, float](), alpha_of(settings)
    for key in sorted(file.keys()):
        module, part = module_of(key, folder)
        base = of_base.get(text_name(f"{module}.weight"))
        if base is None or base.taken is not None:
            raise ConfigError(
                f"{folder}: adapts {module}, which is no matrix by itself in the file of its base, or has another "
                f"order there. {MERGE}"
            )
        shape = tuple(file.get_slice(key).get_shape())
        heads, letter = (base.heads, "b") if part == "B" else (0, "a")
        targets.append(Target(name=f"{base.name}.lora_{letter}", shape=shape, sources=(key,), heads=heads))
        if part == "B":
            scales[key] = scale_of(settings, module) / (alpha / shape[1])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family.arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_name(context.name)
    writer.add_file_type(FORMS[context.type].file_type)
    types = [FORMS[context.type].type] * len(targets)
    announce(writer, targets, types)

    def read(name: str) -> Tensor:
        x: Tensor = file.get_tensor(name)
        return x if scales.get(name, 1.0) == 1 else x.float() * scales[name]

    return Prepared(writer, targets, types, read)


def base_targets(context: ExportContext, config: Any, family: Family) -> dict[str, Target]:
    """Return the tensors of the base's file by the names of the class of the text."""
    quiet = replace(context, notice=lambda line: None)
    found = targets_of(quiet, config, family, ropes_of(config.get_text_config(), family)[0])
    return {text_name(target.sources[0]): target for target in found if len(target.sources) == 1}


def module_of(key: str, folder: Path) -> tuple[str, str]:
    """Return the module and A or B. Raises ConfigError for another tensor than these."""
    found = KEY.fullmatch(key)
    if found is None:
        raise ConfigError(
            f"{folder}: has {key}; llama.cpp adds products of two matrices to linear modules only. {MERGE}"
        )
    return found[1], found[2]


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse what llama.cpp does not compute."""
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{folder}: peft_type is {settings.get('peft_type')}; llama.cpp loads LORA only. {MERGE}")
    for key, only in (
        ("use_dora", False),
        ("bias", "none"),
        ("modules_to_save", None),
        ("alora_invocation_tokens", None),
    ):
        if (value := settings.get(key)) and value != only:
            raise ConfigError(f"{folder}: {key} is {value}, which llama.cpp does not add to a model. {MERGE}")


def scale_of(settings: Mapping[str, Any], module: str) -> float:
    """Return what PEFT multiplies the product of a module's matrices by."""
    rank = matching(settings.get("rank_pattern"), module, settings["r"])
    alpha = matching(settings.get("alpha_pattern"), module, settings["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def alpha_of(settings: Mapping[str, Any]) -> float:
    """Return the alpha of the file, which llama.cpp divides by the rank of each pair."""
    return scale_of({**settings, "rank_pattern": None, "alpha_pattern": None}, "") * float(settings["r"])


def matching(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that ends a module's name, as PEFT finds it."""
    found = (v for k, v in (patterns or {}).items() if re.match(rf"(.*\.)?({k})$", module))
    return next(found, otherwise)
