"""A mixture whose files have the experts of a layer in one tensor is exported as the one with a tensor for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from end_to_end.product import contents
from end_to_end.test_export_formats import draw, exported, tensors_in
from end_to_end.test_exported_towers import WIDE
from models.test_supported import config_of
from outer_models import LOADER, OUTER, STACKED, write_outer

from surogate import run
from surogate_core.errors import ConfigError
from surogate_core.testing.kernels import same_bits

FORMATS = ("fp8-blocks", "fp8-channel", "nvfp4", "nvfp4:compressed-tensors", "nf4")
SPLIT = "qwen3_5_moe"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def model(kind: str) -> Path:
        if not (root / kind).exists():
            text = OUTER[kind]["text_config"] | WIDE | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
            text |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "linear_num_value_heads": 2}
            vision = OUTER[kind]["vision_config"] | {"out_hidden_size": WIDE["hidden_size"]}
            write_outer(root / kind, kind, text_config=text, vision_config=vision)
        return root / kind

    return model


@pytest.mark.parametrize("format", FORMATS)
def test_both_forms_are_written_as_the_same_bytes(format: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_in(models(STACKED)))
    assert not any(name.endswith("experts.gate_up_proj") for name in tensors_in(models(SPLIT)))
    one, config = exported(models(STACKED), tmp_path / "stacked", format)
    two, other = exported(models(SPLIT), tmp_path / "split", format)
    assert config["quantization_config"] == other["quantization_config"]
    assert one.keys() == two.keys() and all(same_bits(tensor, two[name]) for name, tensor in one.items())


def test_hf_keeps_the_stacks(models: Callable[[str], Path], tmp_path: Path) -> None:
    found, _ = exported(models(STACKED), tmp_path / "hf", "hf")
    source = tensors_in(models(STACKED))
    assert found.keys() == source.keys() and all(torch.equal(found[name], source[name]) for name in source)


def test_transformers_loads_the_experts_in_blocks(models: Callable[[str], Path], tmp_path: Path) -> None:
    import transformers

    exported(models(STACKED), tmp_path / "blocks", "fp8-blocks")
    how = {"dtype": torch.bfloat16, "output_loading_info": True}
    theirs, told = getattr(transformers, LOADER).from_pretrained(tmp_path / "blocks", **how)
    assert not told["missing_keys"] and not told["mismatched_keys"] and not told["unexpected_keys"]
    plain = getattr(transformers, LOADER).from_pretrained(models(STACKED), dtype=torch.bfloat16).state_dict()
    for name, tensor in theirs.state_dict().items():
        distance = (tensor.bfloat16() - plain[name]).float().norm() / plain[name].float().norm().clamp(min=1e-9)
        rounded = ".layers." in name and (
            "experts" in name or name.endswith(("_proj.weight", "_qkv.weight", "_z.weight"))
        )
        assert distance < (0.05 if rounded else 1e-9), name


@pytest.mark.parametrize("format", FORMATS)
def test_stacks_of_a_family_that_servers_read_in_one_form_are_refused_by_name(format: str, tmp_path: Path) -> None:
    """gpt-oss is published with stacks alone. Which formats hold it is tested where they are."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = draw(tmp_path / "model", config_of("gpt_oss") | sizes | {"intermediate_size": 256})
    with pytest.raises(ConfigError) as raised:
        run.export(model, tmp_path / "out", format=format)
    line = str(raised.value)
    assert "layers.0.mlp.experts.gate_up_proj is a stack of matrices, each transposed, which servers do not" in line
    assert "Use --format hf or mxfp4; for runs, `surogate quantize`" in line and "\n" not in line
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_stacked_experts_is_merged_first(models: Callable[[str], Path], tmp_path: Path) -> None:
    import transformers
    from peft import LoraConfig, get_peft_model

    base = getattr(transformers, LOADER).from_pretrained(models(STACKED))
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    get_peft_model(base, LoraConfig(r=2, target_modules=["o_proj"], target_parameters=experts)).save_pretrained(
        tmp_path / "adapter"
    )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(models(STACKED))
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"gate_up_proj|down_proj: the adapter changes experts .* Merge it first"):
        run.export(tmp_path / "adapter", tmp_path / "out", format="fp8-blocks", notice=lambda line: None)
    assert not (tmp_path / "out").exists()
    run.merge(tmp_path / "adapter", tmp_path / "merged", notice=lambda line: None)
    exported(tmp_path / "merged", tmp_path / "out", "fp8-blocks")
    assert len(contents(tmp_path / "out")) > 3
