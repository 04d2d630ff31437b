"""MXFP4 in files: gpt-oss as it is published, read as it is and in floating point; quantized, exported and merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace, write_model
from safetensors.torch import load_file, save_file
from stacked_family import write_base
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from surogate import run
from surogate_core.api import ConfigError, SurogateError
from surogate_verify.verification import Extent, verify

SIZES = {"num_hidden_layers": 1, "vocab_size": 2048}
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
LORA: dict[str, Any] = {
    "lora": True,
    "lora_rank": 2,
    "lora_target_modules": ["q_proj"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
SHORT: dict[str, Any] = {
    "from_scratch": None,
    "max_steps": 2,
    "warmup_steps": 0,
    "validation_split_ratio": 0,
    "sequence_len": 32,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "model_dtype": "bf16",
    "learning_rate": 1e-2,
    "eval_steps": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with the folders `model`, in floating point, and `mx`, as gpt-oss is published."""
    root = tmp_path_factory.mktemp("mxfp4")
    workplace = make_workplace(root, **SHORT)
    shutil.rmtree(root / "model")
    write_base(root / "model", **SIZES)
    run.quantize(str(root / "model"), root / "mx", ["qlora_mxfp4=true", "model_dtype=bf16"], notice=lambda line: None)
    return workplace


def train(place: Workplace, name: str, **keys: Any) -> Path:
    """Train into the folder `name`, unless that is done, and return the folder."""
    output = place.root / name
    if not output.exists():
        run.train(run.load(place.write(output_dir=str(output), **keys), mode="train"), notice=lambda line: None)
    return output


def weights(folder: Path, name: str = "model") -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def changed(place: Workplace, folder: Path, **changes: Tensor | None) -> Path:
    """Write the published model with other tensors, by their last names; None: without one."""
    shutil.copytree(place.root / "mx", folder)
    held = weights(place.root / "mx")
    for last, tensor in changes.items():
        name = f"model.layers.0.mlp.experts.{last}"
        held.pop(name, None)
        held |= {} if tensor is None else {name: tensor}
    save_file({name: x.contiguous() for name, x in held.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


# ------------------------------------------------------------------------------------------------------------- written


def test_quantize_writes_experts_alone_as_they_are_published(place: Workplace) -> None:
    before, held = weights(place.root / "model"), weights(place.root / "mx")
    parts = {name + part for name in (GATE_UP, DOWN) for part in ("_blocks", "_scales")}
    assert held.keys() == before.keys() - {GATE_UP, DOWN} | parts
    assert all(torch.equal(held[name], before[name]) for name in before.keys() & held.keys())
    assert (held[f"{GATE_UP}_blocks"].shape, held[f"{GATE_UP}_scales"].shape) == ((5, 128, 2, 16), (5, 128, 2))
    config = json.loads((place.root / "mx/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router"} <= {
        *config["modules_to_not_convert"]
    }
    assert not [name for name in config["modules_to_not_convert"] if "experts" in name]


def test_transformers_loads_the_files_with_the_numbers_that_a_run_reads(place: Workplace) -> None:
    model, found = AutoModelForCausalLM.from_pretrained(
        place.root / "mx", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    held = weights(place.root / "mx")
    own = weights(train(place, "still", model=str(place.root / "mx"), learning_rate=0, max_steps=1))
    for name in (GATE_UP, DOWN):
        decoded = convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"])
        assert torch.equal(model.state_dict()[name], decoded) and torch.equal(own[name], decoded)
    assert "quantization_config" not in json.loads((place.root / "still/config.json").read_text())


def test_export_writes_the_bytes_of_quantize(place: Workplace) -> None:
    run.export(place.root / "model", place.root / "exported", format="mxfp4", notice=lambda line: None)
    exported, quantized = weights(place.root / "exported"), weights(place.root / "mx")
    assert equal(exported, quantized)
    assert (place.root / "exported/config.json").read_text() == (place.root / "mx/config.json").read_text()


def test_of_a_model_without_experts_all_matrices_are_written_and_it_is_told_who_reads_them(tmp_path: Path) -> None:
    place = make_workplace(tmp_path / "dense", **SHORT | {"from_scratch": True})
    dense, told = train(place, "out", max_steps=1), list[str]()
    run.export(dense, tmp_path / "exported", format="mxfp4", notice=told.append)
    assert told == ["transformers and vLLM read MXFP4 in this form of gpt_oss alone. Runs of surogate read it."]
    run.quantize(str(dense), tmp_path / "mx", ["qlora_mxfp4=true", "model_dtype=bf16"], notice=lambda line: None)
    held = weights(tmp_path / "mx")
    assert equal(held, weights(tmp_path / "exported"))
    up = "model.layers.0.mlp.up_proj.weight"
    assert up not in held and held[f"{up}_blocks"].dim() == 3 and held[f"{up}_scales"].dim() == 2
    keys = {**LORA, "lora_target_parameters": [], "model": str(tmp_path / "mx"), "from_scratch": None}
    one, other = (train(place, name, **keys, qlora_mxfp4=as_is) for name, as_is in (("one", True), ("other", False)))
    assert losses(one) == losses(other)


def test_a_mixture_with_a_tensor_for_each_expert_has_the_experts_alone_in_it(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    place = make_workplace(tmp_path / "moe", **SHORT | {"from_scratch": True})
    write_model(place.root / "model", architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **experts)
    model = train(place, "out", max_steps=1)
    run.export(model, tmp_path / "exported", format="mxfp4", notice=lambda line: None)
    run.quantize(str(model), tmp_path / "mx", ["qlora_mxfp4=true", "model_dtype=bf16"], notice=lambda line: None)
    held = weights(tmp_path / "mx")
    assert equal(held, weights(tmp_path / "exported"))
    coded = {name for name, x in held.items() if x.dtype == torch.uint8}
    assert coded and all(".experts." in name for name in coded)


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_on_published_files_is_one_on_the_model_that_is_stored_on_load(place: Workplace) -> None:
    """In MXFP4, and in bf16: the numbers are the same, so are all bits of training."""
    stored = train(place, "stored", **LORA, qlora_mxfp4=True)
    published = train(place, "published", **LORA, qlora_mxfp4=True, model=str(place.root / "mx"))
    in_bf16 = train(place, "in_bf16", **LORA, model=str(place.root / "mx"))
    assert losses(stored) == losses(published) == losses(in_bf16)
    adapters = [weights(folder / "adapter", "adapter_model") for folder in (stored, published, in_bf16)]
    assert equal(adapters[0], adapters[1]) and equal(adapters[0], adapters[2])


def test_experts_that_are_decoded_two_at_a_time_change_no_bit(place: Workplace) -> None:
    """Stored on load, which encodes them so too, and published; kept, recomputed, and with weights on the host."""
    some = {**LORA, "qlora_mxfp4": True, "decoded_experts": "0.035MiB"}
    published = {"model": str(place.root / "mx"), "recompute": True}
    on_host = {**published, "offload_quants": True}
    whole = train(place, "stored", **LORA, qlora_mxfp4=True)
    for name, keys in {"some": {}, "some, recomputed": published, "some, on host": on_host}.items():
        parts = train(place, name, **some, **keys)
        assert losses(parts) == losses(whole)
        assert equal(*(weights(folder / "adapter", "adapter_model") for folder in (parts, whole)))
    assembly = run.plan(run.open_run(run.load(place.write(**some), mode="train"), ["*.json"]), "cpu").assembly
    parts = [op for op in assembly.programs["micro_first"].ops if op.kind.endswith("_part")]
    assert {op.attrs["first"] for op in parts} == {0, 2, 4} and "derive.0.4" in assembly.programs


def test_numbers_that_are_not_finite_are_found_in_each_part_of_a_weight(place: Workplace, tmp_path: Path) -> None:
    shutil.copytree(place.root / "model", tmp_path / "x")
    held = weights(place.root / "model")
    held[DOWN][4, 3, 2] = torch.nan
    save_file(held, tmp_path / "x/model.safetensors", {"format": "pt"})
    refused(place, tmp_path / "x", rf"{DOWN} \[5, 64, 64\]: 1 NaN", decoded_experts="0.01MiB")


def test_ranks_that_divide_published_experts_have_the_bits_of_ranks_that_hold_all(place: Workplace) -> None:
    """Also where those that divide them decode some experts at a time."""
    keys = {**LORA, "qlora_mxfp4": True, "model": str(place.root / "mx"), "ranks_per_gpu": 2}
    levels: dict[int, dict[str, Any]] = {1: {}, 3: {"decoded_experts": "0.035MiB"}}
    whole, divided = (train(place, f"level {n}", **keys, **some, zero_level=n) for n, some in levels.items())
    one, other = (weights(folder / "adapter", "adapter_model") for folder in (whole, divided))
    assert losses(whole) == losses(divided) and equal(one, other)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("model", {**LORA, "qlora_mxfp4": True}), ("mx", LORA), ("mx", {})],
    ids=["stored on load", "published, adapter", "published, all weights"],
)
def test_gradients_are_those_of_transformers_and_peft(place: Workplace, name: str, keys: dict[str, Any]) -> None:
    path = place.write(**keys, model=str(place.root / name))
    result = verify(path, ["model_dtype=bf16"], Extent(), notice=lambda line: None)
    assert result.passed, result.first_wrong


def test_experts_alone_are_held_in_fewer_bits(place: Workplace) -> None:
    keys = {**LORA, "qlora_mxfp4": True, "model": str(place.root / "mx")}
    planned = run.plan(run.open_run(run.load(place.write(**keys), mode="train"), ["*.json"]), "cpu")
    assert set(planned.assembly.stored) == {"layers.0.mlp.gate_up", "layers.0.mlp.down"}


def test_an_adapter_is_merged_into_bf16_or_mxfp4(place: Workplace) -> None:
    published = train(place, "published", **LORA, qlora_mxfp4=True, model=str(place.root / "mx"))
    for name, format in (("merged", "hf"), ("merged_mx", "mxfp4")):
        run.export(published / "adapter", place.root / name, format=format, notice=lambda line: None)
    plain, packed, base = (weights(place.root / name) for name in ("merged", "merged_mx", "mx"))
    assert plain[GATE_UP].dtype == torch.bfloat16 and not torch.equal(
        plain[GATE_UP], convert_moe_packed_tensors(base[f"{GATE_UP}_blocks"], base[f"{GATE_UP}_scales"])
    )
    run.export(place.root / "merged", place.root / "again", format="mxfp4", notice=lambda line: None)
    assert equal(packed, weights(place.root / "again"))
    assert not torch.equal(packed[f"{GATE_UP}_blocks"], base[f"{GATE_UP}_blocks"])
    assert (
        json.loads((place.root / "merged_mx/config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    )


def test_a_run_merges_into_the_format_that_its_key_names(place: Workplace) -> None:
    keys = {**LORA, "qlora_mxfp4": True, "model": str(place.root / "mx"), "merge_adapter": True}
    folder = train(place, "by_key", **keys, merge_format="mxfp4", verify_outputs=True)
    run.export(folder / "adapter", place.root / "by_command", format="mxfp4", notice=lambda line: None)
    assert equal(weights(folder / "merged"), weights(place.root / "by_command"))
    model, found = AutoModelForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and model is not None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"merge_format": "mxfp4"}, "merge_format: is the format of the merged model, and merge_adapter is false"),
        ({"merge_adapter": True, "merge_format": "mxfp5"}, "mxfp5"),
        ({"merge_adapter": True, "merge_format": "mxfp4:a"}, "merge_format: mxfp4:a: mxfp4 has no types"),
        (
            {"merge_adapter": True, "merge_format": "gguf-lora"},
            "merge_format: gguf-lora:f16: is for adapters by themsel",
        ),
    ],
)
def test_a_format_that_cannot_hold_a_merged_model_is_refused_at_the_start(
    place: Workplace, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(SurogateError, match=message):
        run.open_run(run.load(place.write(**LORA, **keys), mode="train"))


# ----------------------------------------------------------------------------------------------------------- bad input


def refused(place: Workplace, model: Path, message: str, **keys: Any) -> None:
    given = {**LORA, "qlora_mxfp4": True, "model": str(model), "output_dir": str(model / "out"), **keys}
    with pytest.raises(ConfigError, match=message):
        run.train(run.load(place.write(**given), mode="train"), notice=lambda line: None)


BOTH = pytest.mark.parametrize("keys", [{}, {"qlora_mxfp4": False}], ids=["as it is", "in bf16"])


@BOTH
def test_a_scale_out_of_range_is_refused_by_the_name_of_its_tensor(place: Workplace, tmp_path: Path, keys: Any) -> None:
    scales = weights(place.root / "mx")[f"{GATE_UP}_scales"].clone()
    scales[3, 7, 1] = 254
    folder = changed(place, tmp_path / "x", gate_up_proj_scales=scales)
    refused(place, folder, rf"{GATE_UP}_scales has the scale code 254 at \[\d, 7, 1\] \(1 such blocks\)", **keys)


@BOTH
def test_blocks_that_are_cut_are_refused_by_name(place: Workplace, tmp_path: Path, keys: Any) -> None:
    blocks = weights(place.root / "mx")[f"{GATE_UP}_blocks"]
    folder = changed(place, tmp_path / "x", gate_up_proj_blocks=blocks[:4])
    refused(place, folder, rf"{GATE_UP}_blocks .*\[5, 128, 2, 16\]", **keys)


@BOTH
def test_a_missing_part_is_refused_by_name(place: Workplace, tmp_path: Path, keys: Any) -> None:
    folder = changed(place, tmp_path / "x", down_proj_scales=None)
    refused(place, folder, f"{DOWN}_scales", **keys)


@BOTH
def test_a_copy_in_bf16_beside_is_refused_by_name(place: Workplace, tmp_path: Path, keys: Any) -> None:
    copy = weights(place.root / "model")[GATE_UP].bfloat16()
    folder = changed(place, tmp_path / "x", gate_up_proj=copy)
    refused(place, folder, rf"{GATE_UP}(_blocks)?", **keys)
    if not keys:
        refused(place, folder, f"holds {GATE_UP} and {GATE_UP}_blocks, which are the same weight in two forms")


def test_codes_in_another_dtype_are_refused_by_name(place: Workplace, tmp_path: Path) -> None:
    blocks = weights(place.root / "mx")[f"{DOWN}_blocks"]
    folder = changed(place, tmp_path / "x", down_proj_blocks=blocks.to(torch.int16))
    refused(place, folder, rf"{DOWN}_blocks must be torch.uint8 .*, found torch.int16")


# --------------------------------------------------------------------------------------------------- products in FP8

FP8: dict[str, Any] = {**LORA, "qlora_mxfp4": True, "recipe": "fp8-hybrid"}


def test_fp8_products_of_experts_have_the_losses_of_files_and_of_the_model_stored_on_load(place: Workplace) -> None:
    """Products read every expert as it is stored, so they are near those of bf16."""
    files, stored = (
        losses(train(place, f"fp8 {which}", model=str(place.root / which), **FP8)) for which in ("mx", "model")
    )
    wide = losses(train(place, "bf16 mx", model=str(place.root / "mx"), **{**FP8, "recipe": "bf16"}))
    assert files == stored and files == pytest.approx(wide, rel=1e-2)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"recompute": True},
        {"offload_quants": True},
        {"ranks_per_gpu": 2, "per_device_train_batch_size": 2, "zero_level": 3},
    ],
    ids=["kept", "recomputed", "on host", "divided"],
)
def test_fp8_copies_of_two_experts_at_a_time_change_no_bit(place: Workplace, keys: dict[str, Any]) -> None:
    given = {**FP8, "model": str(place.root / "mx"), **keys}
    some = {**given, "decoded_experts": "0.0175MiB"}
    whole, parts = (train(place, f"fp8 {len(k)} {keys}", **k) for k in (given, some))
    assert losses(whole) == losses(parts)
    assert equal(*(weights(folder / "adapter", "adapter_model") for folder in (whole, parts)))
    assembly = run.plan(run.open_run(run.load(place.write(**some), mode="train"), ["*.json"]), "cpu").assembly
    ops = [op for p in assembly.programs.values() for op in p.ops if op.kind == "fp8_grouped_linear_part"]
    assert {op.attrs["first"] for op in ops if op.attrs["beside"]} == {0, 2, 4}
    assert {op.attrs["first"] for op in ops if not op.attrs["beside"]} == {0, 2, 4}


@pytest.mark.parametrize("world", [1, 2])
def test_experts_that_e5m2_does_not_hold_are_refused_by_name(place: Workplace, tmp_path: Path, world: int) -> None:
    scales = weights(place.root / "mx")[f"{GATE_UP}_scales"].clone()
    codes = weights(place.root / "mx")[f"{GATE_UP}_blocks"].clone()
    scales[3, 5, 0] = int(scales.max()) - 40
    codes[3, 5, 0] = 0x11
    model = changed(place, tmp_path / "mx", gate_up_proj_scales=scales, gate_up_proj_blocks=codes)
    divided = {"ranks_per_gpu": 2, "per_device_train_batch_size": 2, "zero_level": 3} if world > 1 else {}
    keys = {"model": str(model), "output_dir": str(tmp_path / "out"), **FP8, **divided}
    with pytest.raises(
        ConfigError, match=r"32 elements of layers.0.mlp.gate_up are no numbers of E5M2, .*recipe: bf16"
    ):
        run.train(run.load(place.write(**keys), mode="train"), notice=lambda line: None)
    wide = train(place, f"wide {world}", model=str(model), **{**FP8, "recipe": "bf16"})
    assert losses(wide)[-1] > 0
