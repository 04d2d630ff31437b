"""QLoRA: an adapter over a base in a weight format, quantized while it is loaded or stored quantized."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate import run
from surogate.checkpoints import base
from surogate.checkpoints.found_run import found_run
from surogate.checkpoints.manifest import read_manifest, write_manifest
from surogate.checkpoints.stored_base import stored_base
from surogate.outputs.load_commands import load_commands
from surogate_core.api import Merge
from surogate_core.errors import ConfigError, PluginError
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import Registry

FORMATS = ("qlora_bnb", "qlora_fp8", "qlora_fp4")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose model has weights, drawn by transformers."""
    keys = {"from_scratch": None, "lora_rank": 4, "learning_rate": 1e-2, "eval_steps": 0}
    workplace = make_workplace(tmp_path_factory.mktemp("qlora"), max_steps=4, save_steps=2, **keys)
    draw(workplace.root / "model", max_shard_size="200KB")
    return workplace


def draw(model: Path, seed: int = 0, **save: Any) -> Path:
    """Write random weights into the folder of a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    drawn.save_pretrained(model, **save)
    return model


@pytest.fixture(scope="module")
def untied(place: Workplace) -> Path:
    """A model with an LM head of its own, stored in FP8 with its head."""
    model = draw(write_model(place.root / "untied", tie_word_embeddings=False))
    keys = ["qlora_fp8=true", "quantize_lm_head=true", "model_dtype=fp32"]
    run.quantize(str(model), place.root / "untied-fp8", keys)
    return place.root / "untied-fp8"


def quantized(place: Workplace, key: str, *more: str) -> Path:
    """Return the model of `place`, stored in a weight format."""
    folder = place.root / "-".join((key, *more)).replace("=", "-")
    if not folder.exists():
        run.quantize(str(place.root / "model"), folder, [f"{key}=true", *more])
    return folder


def trained(place: Workplace, name: str, **keys: object) -> tuple[list[float], dict[str, Tensor]]:
    """Train an adapter into the folder `name`. Return its losses and its weights."""
    output = place.root / name
    run.train(run.load(place.write(output_dir=str(output), **keys), mode="sft"))
    return losses(output), load_file(output / "adapter/adapter_model.safetensors")


@pytest.mark.parametrize(("key", "dtype"), [*((key, "fp32") for key in FORMATS), *((key, "bf16") for key in FORMATS)])
def test_a_base_that_is_stored_quantized_trains_like_one_that_is_quantized_on_load(
    place: Workplace, key: str, dtype: str
) -> None:
    """The model is in fp32, which a run in bf16 rounds before it quantizes."""
    keys = {"model_dtype": dtype, key: True}
    model = quantized(place, key, *(["model_dtype=fp32"] if dtype == "fp32" else []))
    loaded = trained(place, f"{key}-{dtype}-loaded", **keys)
    stored = trained(place, f"{key}-{dtype}-stored", model=str(model), **keys)
    assert loaded[1].keys() == stored[1].keys()
    if key == "qlora_fp4":  # its files share a scale of q, k and v, and of gate and up
        assert loaded[0] == pytest.approx(stored[0], abs=5e-3)
        return
    assert loaded[0] == stored[0]
    assert [name for name in loaded[1] if not torch.equal(loaded[1][name], stored[1][name])] == []


def test_files_in_nvfp4_of_release_0_2_train_like_a_base_that_is_quantized_on_load(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix had a scale of its own, and the config no `config_groups`. Quantizing by the ops still does that."""
    monkeypatch.setattr(Registry, "export_formats", lambda registry: {})
    old = place.root / "of-0.2"
    run.quantize(str(place.root / "model"), old, ["qlora_fp4=true"])
    config = json.loads((old / "config.json").read_text())
    del config["quantization_config"]["config_groups"]
    (old / "config.json").write_text(json.dumps(config))
    loaded = trained(place, "fp4-loaded", qlora_fp4=True, model_dtype="bf16")
    stored = trained(place, "fp4-of-0.2", qlora_fp4=True, model_dtype="bf16", model=str(old))
    assert loaded[0] == stored[0]
    assert all(torch.equal(loaded[1][name], stored[1][name]) for name in loaded[1])


def test_a_stopped_run_resumes_with_the_same_bits(place: Workplace) -> None:
    straight = trained(place, "straight", qlora_bnb=True)
    resumed = trained(
        place, "resumed", qlora_bnb=True, resume_from_checkpoint=str(place.root / "straight/step_00000002")
    )
    assert straight[0][2:] == resumed[0]
    assert all(torch.equal(straight[1][name], resumed[1][name]) for name in straight[1])


def resumed_lines(place: Workplace, checkpoint: Path, name: str, **keys: object) -> list[str]:
    """Resume from a checkpoint in the folder `name`. Return the lines that were printed."""
    shown: list[str] = []
    config = place.write(output_dir=str(place.root / name), resume_from_checkpoint=str(checkpoint), **keys)
    run.train(run.load(config, mode="sft"), notice=shown.append)
    return shown


OFFLOADED = {"offload_quants": 1, "offload_optimizer": True, "use_zero_copy": True}


@pytest.fixture(scope="module")
def saved(place: Workplace) -> Path:
    """A checkpoint of a QLoRA run in the middle."""
    trained(place, "saved", qlora_bnb=True)
    return place.root / "saved/step_00000002"


def test_a_run_that_resumes_with_other_offloading_has_the_same_bits_and_nothing_says_otherwise(
    place: Workplace, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surogate_offload_states.selection.SMALLEST_BYTES", 1)
    shown = resumed_lines(place, saved, "offloaded", qlora_bnb=True, **OFFLOADED)
    assert not any("not bit-identical" in line for line in shown), shown
    assert losses(place.root / "offloaded") == losses(place.root / "saved")[2:]
    back = resumed_lines(place, place.root / "offloaded/step_00000004", "not-offloaded", qlora_bnb=True)
    assert not any("not bit-identical" in line for line in back), back


def test_a_run_that_resumes_without_its_weight_format_says_that_the_package_is_not_used(
    place: Workplace, saved: Path
) -> None:
    shown = resumed_lines(place, saved, "without-format")
    (line,) = [line for line in shown if "not bit-identical" in line]
    assert "qlora_bnb: false (saved: true)" in line
    assert re.search(r"surogate-qlora-nf4 not used \(saved: [\d.]+\)", line)


def test_an_adapter_does_not_resume_on_another_base_of_the_same_shape(place: Workplace, saved: Path) -> None:
    other = write_model(place.root / "other")
    draw(other, seed=1)
    with pytest.raises(
        ConfigError, match=r"was saved with base weights \w+, model: .*/model \(this run: \w+\)\. Restore"
    ):
        resumed_lines(place, saved, "other-base", qlora_bnb=True, model=str(other))


def test_a_base_may_move_and_its_tensors_may_be_in_other_files(place: Workplace, saved: Path, tmp_path: Path) -> None:
    moved = write_model(tmp_path / "moved")
    tensors = {name: t for path in place.root.glob("model/*.safetensors") for name, t in load_file(path).items()}
    save_file(tensors, moved / "model.safetensors")
    (moved / "config.json").write_text((place.root / "model/config.json").read_text())
    shown = resumed_lines(place, saved, "moved-base", qlora_bnb=True, model=str(moved))
    assert not any("bit-identical" in line for line in shown), shown
    assert losses(place.root / "moved-base") == losses(place.root / "saved")[2:]


def test_a_run_resumes_on_the_quantized_copy_of_its_base_and_back_with_a_notice(place: Workplace, saved: Path) -> None:
    copy, keys = str(quantized(place, "qlora_bnb", "model_dtype=fp32")), {"qlora_bnb": True}
    (line,) = [line for line in resumed_lines(place, saved, "on-copy", model=copy, **keys) if "identical" in line]
    assert "base files in bitsandbytes (saved: floating point)" in line and "the same base in nf4" in line
    assert losses(place.root / "on-copy") == losses(place.root / "saved")[2:]
    (line,) = [
        line
        for line in resumed_lines(place, place.root / "on-copy/step_00000004", "back", **keys)
        if "identical" in line
    ]
    assert "base files in floating point (saved: bitsandbytes)" in line


def test_a_checkpoint_without_facts_of_its_base_resumes(place: Workplace, saved: Path, tmp_path: Path) -> None:
    older = shutil.copytree(saved, tmp_path / saved.name)
    manifest = read_manifest(older)
    assert manifest.facts["base_held_as"] == "nf4"
    facts = {fact: value for fact, value in manifest.facts.items() if not fact.startswith("base_")}
    facts["model_config.quantization_config"] = {"quant_method": "bitsandbytes"}
    write_manifest(older, replace(manifest, facts=facts))
    resumed_lines(place, older, "older", qlora_bnb=True)
    assert losses(place.root / "older") == losses(place.root / "saved")[2:]


def test_every_format_trains_and_differs_from_the_full_base(place: Workplace) -> None:
    full = trained(place, "full")[0]
    for key in FORMATS:
        found = losses(place.root / f"{key}-fp32-loaded") if (place.root / f"{key}-fp32-loaded").exists() else []
        found = found or trained(place, f"{key}-again", **{key: True})[0]
        assert found != full and max(abs(a - b) for a, b in zip(found, full, strict=True)) < 0.1, key


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qlora_bnb": True, "qlora_fp8": True}, "true, but so is qlora_.*: true; weights have one format"),
        ({"qlora_bnb": True, "lora": False}, "qlora_bnb: stores frozen weights, but this run trains all of them"),
        (
            {"qlora_bnb": True, "qlora_bnb_block_size": 128},
            "64 columns, which is no multiple of qlora_bnb_block_size: 128",
        ),
        ({"qlora_bnb": True, "qlora_bnb_block_size": 96}, "qlora_bnb_block_size"),
        ({"quantize_lm_head": True}, "quantize_lm_head: true, but no weight format is selected"),
        (
            {"qlora_bnb": True, "quantize_lm_head": True},
            "LM head of this model is its embedding. quantize_embedding: true stores both",
        ),
        (
            {"qlora_bnb": True, "quantize_embedding": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]},
            "quantize_embedding: true, but this run trains embedding in full. Leave it out",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(place: Workplace, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.plan(run.load(place.write(**keys), mode="sft"), "h200")


def test_columns_that_no_block_of_nf4_divides_name_a_format_that_takes_them(place: Workplace) -> None:
    model = str(write_model(place.root / "narrow", hidden_size=72))
    with pytest.raises(ConfigError, match=r"72 columns, .* No block size divides it\. Use qlora_fp8: true"):
        run.plan(run.load(place.write(model=model, qlora_bnb=True), mode="sft"), "h200")
    assert run.plan(run.load(place.write(model=model, qlora_fp8=True), mode="sft"), "h200").report.fits


def test_a_quantized_base_needs_the_keys_that_it_was_stored_with(place: Workplace) -> None:
    nf4, fp8 = quantized(place, "qlora_bnb"), quantized(place, "qlora_fp8")
    cases: list[tuple[Path, dict[str, object], str]] = [
        (nf4, {}, "To train an adapter on them, set qlora_bnb: true. Otherwise: use the original"),
        (nf4, {"qlora_fp8": True}, "set qlora_bnb: true. Otherwise"),
        (nf4, {"qlora_bnb": True, "qlora_bnb_double_quant": False}, "Set qlora_bnb_double_quant: true"),
        (nf4, {"qlora_bnb": True, "merge_adapter": True}, "merge_adapter: true needs the others"),
        (fp8, {"qlora_fp8": True, "qlora_block_size": 64}, "Set qlora_block_size: 128"),
    ]
    for model, keys, message in cases:
        with pytest.raises(ConfigError, match=message):
            run.plan(run.load(place.write(model=str(model), **keys), mode="sft"), "h200")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda codes, scales: [codes], "returned 1 states, but .* is made from the weight itself: return it too"),
        (lambda codes, scales: [codes[:8], scales], "returned fewer rows for the matrices of layers"),
        (lambda codes, scales: [codes.float(), scales], r"returned float32 \[\d+, 64\] for state 0 of model"),
    ],
)
def test_a_format_that_does_not_return_what_the_run_holds_is_named(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, returned: Callable[..., Any], message: str
) -> None:
    def load(tensor: Any, parts: dict[str, Tensor], options: Any) -> Any:
        return returned(parts[tensor.name], parts[f"{tensor.name}_scale_inv"])

    def base_format(*arguments: Any) -> Any:
        found = original(*arguments)
        return replace(found, form=replace(found.form, form=replace(found.form.form, load=load)))

    original = base._base_format
    monkeypatch.setattr(base, "_base_format", base_format)
    with pytest.raises(PluginError, match=f"weight format fp8 .* failed in checkpoints.load: {message}"):
        trained(place, "wrong-form", model=str(quantized(place, "qlora_fp8")), qlora_fp8=True)


def test_two_formats_that_read_one_checkpoint_are_both_named(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = load_registry().weight_formats()
    twin = replace(formats["nf4"], checkpoints=formats["fp8"].checkpoints)
    monkeypatch.setattr(Registry, "weight_formats", lambda registry: {**formats, "nf4": twin})
    with pytest.raises(
        PluginError, match=r"both weight format \w+ of surogate-qlora-\w+ .* and weight format .* read it"
    ):
        run.plan(run.load(place.write(model=str(quantized(place, "qlora_fp8")), qlora_fp8=True), mode="sft"), "h200")


def test_a_method_that_no_format_reads_is_refused(place: Workplace, tmp_path: Path) -> None:
    config = json.loads((place.root / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="No installed weight format or checkpoint form reads quant_method: gptq"):
        run.plan(run.load(place.write(model=str(tmp_path)), mode="sft"), "h200")


@pytest.mark.parametrize(
    ("stored", "keys", "message"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            {"qlora_fp8": True},
            "only NVFP4 can be read. Use the orig",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {}, "not in NF4. Use the original"),
        ({"quant_method": "fp8"}, {"from_scratch": True, "lora": False}, "Remove quantization_config from the file"),
    ],
)
def test_files_that_a_format_cannot_read_are_not_answered_with_its_key(
    stored: dict[str, object], keys: dict[str, object], message: str, place: Workplace, tmp_path: Path
) -> None:
    config = json.loads((place.root / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with pytest.raises(ConfigError, match=message) as caught:
        run.plan(run.load(place.write(model=str(tmp_path), **keys), mode="sft"), "h200")
    assert "To train an adapter" not in str(caught.value)


def damaged(folder: Path, into: Path, name: str, tensor: Tensor | None) -> Path:
    """Copy a model with one tensor replaced, or removed."""
    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    for path in into.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor
            save_file(tensors, path, metadata={"format": "pt"})
    index = into / "model.safetensors.index.json"
    if tensor is None and index.exists():
        content = json.loads(index.read_text())
        del content["weight_map"][name]
        index.write_text(json.dumps(content))
    return into


@pytest.mark.parametrize(
    ("key", "part", "tensor", "message"),
    [
        ("qlora_bnb", ".absmax", None, r"lacks .*o_proj\.weight\.absmax"),
        ("qlora_bnb", ".absmax", torch.zeros(3, dtype=torch.uint8), r"o_proj\.weight: absmax must be 64 elements"),
        (
            "qlora_bnb",
            ".quant_state.bitsandbytes__nf4",
            torch.zeros(9, dtype=torch.uint8),
            r"safetensors: .*o_proj\.weight: its quant_state\.bitsandbytes__nf4 is no JSON",
        ),
        ("qlora_bnb", ".quant_map", torch.zeros(16), r"o_proj\.weight: its map of codes is not that of bitsandbytes"),
        ("qlora_fp8", "_scale_inv", torch.zeros(2, 2), r"o_proj\.weight: its scales must be fp32 or bf16 \[1, 1\]"),
        ("qlora_fp4", "_scale", torch.zeros(3), r"o_proj\.weight: must be torch\.float8_e4m3fn \[64, 4\]"),
    ],
)
def test_damaged_parts_are_named(
    place: Workplace, tmp_path: Path, key: str, part: str, tensor: Tensor | None, message: str
) -> None:
    name = f"model.layers.0.self_attn.o_proj.weight{part}"
    model = damaged(quantized(place, key), tmp_path / "damaged", name, tensor)
    with pytest.raises(ConfigError, match=message):
        trained(place, "refused", model=str(model), overwrite_output_dir=True, **{key: True})


def spoiled(folder: Path, into: Path, name: str) -> Path:
    """Copy a model with NaN in the first element of one of its tensors."""
    tensor = next(found[name] for found in map(load_file, folder.glob("*.safetensors")) if name in found)
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).view(-1)[0] = 0x7F
    else:
        tensor.view(-1)[0] = torch.nan
    return damaged(folder, into, name, tensor)


@pytest.mark.parametrize(
    ("key", "more", "part"),
    [
        ("qlora_fp8", [], ""),
        ("qlora_fp8", [], "_scale_inv"),
        ("qlora_fp4", [], "_scale"),
        ("qlora_fp4", [], "_scale_2"),
        ("qlora_bnb", [], ".nested_absmax"),
        ("qlora_bnb", ["qlora_bnb_double_quant=false"], ".absmax"),
    ],
)
def test_a_quantized_base_with_nan_is_refused_and_its_file_and_tensor_are_named(
    place: Workplace, tmp_path: Path, key: str, more: list[str], part: str
) -> None:
    name = f"model.layers.0.self_attn.k_proj.weight{part}"
    model = spoiled(quantized(place, key, *more), tmp_path / "damaged", name)
    keys = {key: True} | {text.split("=")[0]: False for text in more}
    with pytest.raises(ConfigError) as refused:
        trained(place, "refused", model=str(model), overwrite_output_dir=True, **keys)
    title, line = str(refused.value).splitlines()
    assert title == f"{model}: weights hold NaN or inf. Train from another checkpoint."
    assert re.fullmatch(rf"  model\S*\.safetensors: {re.escape(name)} \[.*\]: 1 NaN of .*", line), line


@pytest.mark.parametrize("keys", [{}, {"lora_modules_to_save": ["lm_head"]}])
def test_a_checkpoint_with_a_quantized_head_names_the_key_to_set(
    place: Workplace, untied: Path, tmp_path: Path, keys: dict[str, object]
) -> None:
    remedy = "This run trains it. Use the original checkpoint" if keys else "Set quantize_lm_head: true"
    keys = {"qlora_fp8": True, "model": str(untied), "overwrite_output_dir": True, **keys}
    with pytest.raises(ConfigError, match=rf"config\.json: .*: lm_head\.weight is stored quantized\. {remedy}"):
        run.plan(run.load(place.write(**keys), mode="sft"), "h200")
    silent = shutil.copytree(untied, tmp_path / "silent")  # config.json does not list what is in full precision
    config = json.loads((silent / "config.json").read_text())
    del config["quantization_config"]["modules_to_not_convert"]
    (silent / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"safetensors: lm_head\.weight is stored quantized\. {remedy}"):
        trained(place, "refused", **keys | {"model": str(silent)})


def test_a_checkpoint_with_a_quantized_head_trains_with_the_key(place: Workplace, untied: Path) -> None:
    keys = {"qlora_fp8": True, "quantize_lm_head": True, "max_steps": 2}
    stored = trained(place, "head-stored", model=str(untied), **keys)
    assert stored[0] == trained(place, "head-loaded", model=str(place.root / "untied"), **keys)[0]


def test_a_checkpoint_with_a_quantized_embedding_names_the_key_to_set(
    place: Workplace, untied: Path, tmp_path: Path
) -> None:
    name = "model.embed_tokens.weight"
    model = damaged(untied, tmp_path / "model", name, torch.zeros(2048, 64).to(torch.float8_e4m3fn))
    keys = {"qlora_fp8": True, "quantize_lm_head": True, "model": str(model), "overwrite_output_dir": True}
    with pytest.raises(ConfigError, match=rf"safetensors: {name} is stored quantized\. Set quantize_embedding: true\."):
        trained(place, "refused", **keys)


def test_a_matrix_that_is_half_quantized_is_refused_with_its_file(
    place: Workplace, untied: Path, tmp_path: Path
) -> None:
    model = damaged(untied, tmp_path / "model", "model.layers.0.self_attn.k_proj.weight", torch.zeros(32, 64))
    keys = {"qlora_fp8": True, "quantize_lm_head": True, "model": str(model), "overwrite_output_dir": True}
    message = r"safetensors: .*0\.self_attn\.q_proj\.weight is quantized and .*0\.self_attn\.k_proj\.weight is not"
    with pytest.raises(ConfigError, match=message):
        trained(place, "refused", **keys)


@pytest.mark.parametrize(
    ("key", "programs"), [("qlora_fp4", {"vLLM"}), ("qlora_bnb", {"surogate", "PEFT", "vLLM", "lm-eval"})]
)
def test_commands_are_those_of_programs_that_load_the_quantized_base(
    place: Workplace, key: str, programs: set[str]
) -> None:
    """An adapter of such a base is merged into the original, so no command merges it."""
    model = str(quantized(place, key))
    found = load_commands(run.open_run(run.load(place.write(model=model, **{key: True}), mode="sft")))
    assert {program for program, _ in found} == programs and len(found) == len(programs)
    ranks = place.write(model=model, **{key: True, "lora_rank_pattern": {"q_proj": 1}})  # which vLLM does not serve
    assert {program for program, _ in load_commands(run.open_run(run.load(ranks, mode="sft")))} == programs - {"vLLM"}


def test_merging_says_how_far_the_model_is_from_the_stored_base(place: Workplace, tmp_path: Path) -> None:
    output = place.root / "merged-from"
    run.train(run.load(place.write(output_dir=str(output), qlora_bnb=True), mode="sft"))
    lines: list[str] = []
    run.merge(output / "adapter", tmp_path / "model", notice=lines.append)
    (line,) = lines
    found = re.search(r"a base in nf4: .* differ .* by ([\d.]+)% to ([\d.]+)%", line)
    assert found is not None, line
    assert 3 < float(found[1]) <= float(found[2]) < 11
    assert (tmp_path / "model/model.safetensors.index.json").exists()


MODULES = {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["embed_tokens", "lm_head"]}


def test_the_distance_is_that_of_stored_matrices_alone(place: Workplace, tmp_path: Path) -> None:
    """Modules that are trained in full replace those of the base: nothing of them was ever in the format."""
    output = place.root / "with-modules"
    run.train(run.load(place.write(output_dir=str(output), qlora_bnb=True, **MODULES), mode="sft"))
    base = stored_base(found_run(output / "adapter"), place.root / "model", load_registry(), pytest.fail)
    assert base is not None
    assert base.tensors.keys() == {
        f"model.layers.{layer}.{name}_proj.weight"
        for layer in (0, 1)
        for name in (*(f"self_attn.{x}" for x in "qkvo"), *(f"mlp.{x}" for x in ("gate", "up", "down")))
    }
    lines: list[str] = []
    run.merge(output / "adapter", tmp_path / "model", notice=lines.append)
    merged = base.watched(Merge(base_model="", changes=dict.fromkeys(("lm_head.weight", *base.tensors), lambda w: w)))
    for change in merged.changes.values():
        change(torch.randn(64, 64))
    assert base.distances.keys() == base.tensors.keys()
    assert len(lines) == 1 and "a base in nf4" in lines[0]


@pytest.mark.parametrize(
    ("spoil", "plugins", "why"),
    [
        (lambda text: "a: [", "", r"run\.yaml"),
        (lambda text: text + "\nunheard_of: 1", "", r"run\.yaml: .*unheard_of"),
        (lambda text: text.replace("recipe: bf16", "recipe: gone"), "", r"run\.yaml: .*gone"),
        (lambda text: text, "-surogate-qlora-nf4", r"run\.yaml: .*qlora_bnb"),
    ],
)
def test_a_run_file_that_cannot_be_used_does_not_stop_a_merge(
    place: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[str], str],
    plugins: str,
    why: str,
) -> None:
    output = place.root / "merged-after"
    if not output.exists():
        run.train(run.load(place.write(output_dir=str(output), qlora_bnb=True), mode="sft"))
    copy = Path(shutil.copytree(output, tmp_path / "copy"))
    (copy / "run.yaml").write_text(spoil((copy / "run.yaml").read_text()))
    monkeypatch.setenv("SUROGATE_PLUGINS", plugins)
    lines: list[str] = []
    run.merge(copy / "adapter", tmp_path / "model", notice=lines.append)
    monkeypatch.undo()
    *_, line = lines  # one before it may say that plugins of the run are not loaded
    assert re.search(rf"^not shown: how far the model is from .* because of .*{why}", line) and "\n" not in line, line
    assert (tmp_path / "model/config.json").exists()
