"""Parts of a model that no run trains stay as they are in every export format, and readers of others know which.

transformers and compressed-tensors decide by lists in config.json which modules they read as quantized.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.test_export_formats import draw, exported, of_format, tensors_in
from models.test_supported import config_of
from outer_models import HYBRID, LOADER, OUTER, write_outer
from safetensors.torch import save_file
from torch import Tensor

from surogate_core.testing.kernels import same_bits

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""Sizes of a text whose matrices every format holds."""
LAYERS = 2
FORMATS = ("fp8-channel", "fp8-blocks", "nvfp4", "nvfp4:compressed-tensors", "nf4")
PREDICTS = {"qwen3_5": "mtp.layers.0", "glm4_moe": f"model.layers.{LAYERS}"}
"""Names of a layer that predicts further tokens, as files have it."""
KINDS = ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4_moe")
"""gemma3, mistral3 and qwen2_5_vl have other names in files than in their class."""


def wide(kind: str) -> dict[str, Any]:
    """Keys of an outer model's config whose text is `WIDE`."""
    text = OUTER[kind]["text_config"]
    text = text | {key: size for key, size in WIDE.items() if key in text}
    if "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [12, 10, 10]}
    if HYBRID.items() <= text.items():
        text |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 2}
    vision = OUTER[kind]["vision_config"]
    return {"text_config": text, "vision_config": vision | {k: 128 for k in vision if k == "out_hidden_size"}}


def add_predicting(folder: Path, kind: str) -> None:
    """Add a layer that predicts a further token, which transformers does not save: a copy of the last one."""
    tensors = tensors_in(folder)
    last = next(f"{begin}layers.{LAYERS - 1}." for begin in ("model.language_model.", "model.") if has(tensors, begin))
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[f"{PREDICTS[kind]}.{name.removeprefix(last)}"] = tensors[name].flip(0).contiguous()
    head = "mtp.fc.weight" if kind == "qwen3_5" else f"{PREDICTS[kind]}.eh_proj.weight"
    tensors[head] = torch.randn(WIDE["hidden_size"], 2 * WIDE["hidden_size"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if kind == "glm4_moe":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def has(tensors: dict[str, Tensor], begin: str) -> bool:
    return any(name.startswith(f"{begin}layers.") for name in tensors)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model with a part that is kept, drawn by transformers."""
    root = tmp_path_factory.mktemp("models")

    def model(kind: str) -> Path:
        folder = root / kind
        if folder.exists():
            return folder
        if kind == "glm4_moe":
            draw(folder, config_of(kind, LAYERS) | WIDE | {"moe_intermediate_size": 128, "n_routed_experts": 6})
        else:
            write_outer(folder, kind, **wide(kind))
        if kind in PREDICTS:
            add_predicting(folder, kind)
        return folder

    return model


def is_kept(name: str) -> bool:
    return any(part in name for part in ("vision_tower", "projector", "visual", *PREDICTS.values(), "mtp."))


def quantized_in(found: dict[str, Tensor]) -> set[str]:
    """Return the modules whose weights the files hold in few bits."""
    ends = (".weight", ".weight_packed")
    few = {name for name, tensor in found.items() if tensor.dtype in (torch.float8_e4m3fn, torch.uint8)}
    return {name.removesuffix(end) for name in few for end in ends if name.endswith(end)}


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_has_the_bits_of_the_model_and_lists_name_it_alone(
    kind: str, format: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """By the functions with which transformers and compressed-tensors match a module's name against a list."""
    from compressed_tensors.utils.match import match_name
    from transformers.quantizers.quantizers_utils import should_convert_module

    source, (found, config) = tensors_in(models(kind)), exported(models(kind), tmp_path / "out", format)
    kept = {name for name in source if is_kept(name)}
    assert len(kept) > 8 and all(same_bits(found[name], source[name]) for name in kept)
    quantized = quantized_in(found)
    matrices = {name.removesuffix(".weight") for name in kept if source[name].dim() == 2 and name.endswith(".weight")}
    assert len(quantized) >= 13 and len(matrices) >= 4 and not any(map(is_kept, quantized))
    stored = config["quantization_config"]
    if "ignore" not in stored:
        listed = stored.get("modules_to_not_convert") or stored["llm_int8_skip_modules"]
        assert all(should_convert_module(name, listed) for name in quantized)
        assert not any(should_convert_module(name, listed) for name in matrices)
        assert matrices <= set(listed)  # vLLM compares whole names
    elif stored["quant_method"] == "compressed-tensors":
        assert not [name for name in quantized if any(match_name(name, each) for each in stored["ignore"])]
        assert all(any(match_name(name, each) for each in stored["ignore"]) for name in matrices)


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_of_modelopt_are_of_what_is_kept_alone(
    kind: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM excludes a module whose name contains an entry, or that an entry with a wildcard matches."""
    from fnmatch import fnmatchcase

    found, config = exported(models(kind), tmp_path / "out", "nvfp4")
    listed = config["quantization_config"]["ignore"]

    def excluded(name: str) -> bool:
        return any(entry in name or fnmatchcase(name, entry) for entry in listed)

    kept = {name.removesuffix(".weight") for name in found if is_kept(name) and found[name].dim() == 2}
    assert kept and all(map(excluded, kept)) and not any(map(excluded, quantized_in(found)))


# ----------------------------------------------------------------------------------------------------------- readers


def class_of(kind: str) -> Any:
    import transformers

    return getattr(transformers, "AutoModelForCausalLM" if kind == "glm4_moe" else LOADER)


def linear_in_blocks(model: Any) -> set[str]:
    """Return the linear modules of a model's text that formats quantize, as transformers names them."""
    linear = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    others = ("lm_head", "in_proj_a", "in_proj_b")
    return {name for name in linear if not is_kept(name) and not name.endswith(others)}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_blocks_where_the_files_have_them(
    kind: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """On a GPU it replaces the modules that hold codes before it reads the files, by the list alone."""
    from transformers import AutoConfig, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    _, config = exported(models(kind), tmp_path / "out", "fp8-blocks")
    with torch.device("meta"):
        model = class_of(kind).from_config(AutoConfig.from_pretrained(models(kind)))
    wanted = linear_in_blocks(model)
    assert len(wanted) >= 13 or kind == "glm4_moe"
    stored = FineGrainedFP8Config.from_dict(config["quantization_config"])
    FineGrainedFP8HfQuantizer(stored, pre_quantized=True)._process_model_before_weight_loading(model)
    made = {name for name, module in model.named_modules() if type(module).__name__ == "FP8Linear"}
    assert made == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_dequantizes_blocks_beside_what_is_kept(
    kind: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """The whole model is that of the same matrices in floating point: nothing is missing, nothing is left over."""
    from surogate_qlora_fp8.reference import fp8_tile_dequantize

    found, _ = exported(models(kind), tmp_path / "out", "fp8-blocks")
    theirs, told = class_of(kind).from_pretrained(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    plain = {name: tensor for name, tensor in found.items() if not name.endswith("_scale_inv")}
    for name in {name for name in plain if f"{name}_scale_inv" in found}:
        codes, scales = found[name], found[f"{name}_scale_inv"]
        plain[name] = fp8_tile_dequantize(codes, scales, rows=(len(codes),), tile=128, dtype="bf16")
    config = json.loads((models(kind) / "config.json").read_text())
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    save_file(plain, tmp_path / "plain/model.safetensors", {"format": "pt"})
    ours = class_of(kind).from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert theirs.state_dict().keys() == ours.keys()
    read = theirs.state_dict().items()  # in the dtype of the files, where no list says so
    assert [name for name, tensor in read if not torch.equal(tensor.bfloat16(), ours[name])] == []


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        *(("gemma3", "fp8-channel"), ("gemma3", "nvfp4:compressed-tensors"), ("mistral3", "fp8-channel")),
        *(("qwen2_5_vl", "fp8-channel"), ("qwen3_5", "nvfp4:compressed-tensors")),
    ],
)
def test_compressed_tensors_loads_a_model_with_a_tower(
    kind: str, format: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Through transformers, which reads a matrix as quantized if the list does not name its module."""
    pytest.importorskip("compressed_tensors", reason="transformers loads the files with it")
    found, _ = exported(models(kind), tmp_path / "out", format)
    plain = class_of(kind).from_pretrained(models(kind), dtype=torch.bfloat16)
    wanted, before = linear_in_blocks(plain), plain.state_dict()
    theirs, told = class_of(kind).from_pretrained(tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    assert {name for name, module in theirs.named_modules() if hasattr(module, "quantization_scheme")} == wanted
    after = theirs.state_dict()
    kept = {name for name in before if is_kept(name)}
    assert kept and all(torch.equal(after[name], before[name]) for name in kept)
    last = max(name for name in wanted if name.endswith("mlp.down_proj"))
    in_files = next(name for name in quantized_in(found) if name.endswith(last.partition("layers.")[2]))
    values = of_format(format, found, f"{in_files}.weight").bfloat16()
    assert (values - before[f"{last}.weight"]).norm() < 0.15 * values.norm()
    if format == "fp8-channel":
        module = theirs.get_submodule(last)
        assert torch.equal(module.weight.float(), found[f"{in_files}.weight"].float())


def test_projections_of_a_delta_rule_that_servers_stack_share_a_scale(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM has `in_proj_qkv` and `in_proj_z` as one matrix, with the largest of their global scales."""
    found, _ = exported(models("qwen3_5"), tmp_path / "out", "nvfp4")
    stem = "model.language_model.layers.0.linear_attn."
    scales = [found[f"{stem}{name}.weight_scale_2"] for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
    assert scales[0] == scales[1] != scales[2]
