"""`surogate export --format`: what is written is the reference of the format, and programs of others read it."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import EXAMPLES, assert_refused, contents, invoke
from models.test_supported import config_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate import run
from surogate_core.errors import ConfigError, PluginError
from surogate_core.testing.kernels import same_bits
from surogate_qlora_fp4.exports import stacks
from surogate_qlora_fp4.reference import fp4_block_dequantize, fp4_block_quantize
from surogate_qlora_fp8.reference import fp8_channel_dequantize, fp8_channel_quantize, fp8_tile_quantize

FAMILIES = (
    *("llama", "llama_tied", "llama_biased", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied", "smollm3", "mistral"),
    *("phi3", "olmo2", "olmo3", "gemma2", "gemma3_text", "qwen3_moe", "qwen3_moe_dense", "olmoe", "ministral3"),
)
FORMATS = ("fp8-channel", "nvfp4", "nvfp4:compressed-tensors")
every_family = pytest.mark.parametrize("family", FAMILIES)

UP = "model.layers.1.mlp.up_proj.weight"

Tensors = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's tiny model, drawn by transformers in bf16."""
    root = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        if not (root / family).exists():
            draw(root / family, config_of(family))
        return root / family

    return model


def draw(folder: Path, config: Mapping[str, Any], **how: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder, **how)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLES / "tiny-qwen3" / name, folder / name)
    return folder


def exported(model: Path, output: Path, format: str, **how: Any) -> tuple[Tensors, dict[str, Any]]:
    """Export a model. Return the tensors of the files and the parsed config.json."""
    run.export(model, output, format=format, notice=lambda line: None, **how)
    return tensors_in(output), json.loads((output / "config.json").read_text())


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def matrices_of(tensors: Tensors) -> set[str]:
    """The matrices of blocks, by their names: projections of attention, of the MLP, and of experts."""
    return {name for name in tensors if ".layers." in name and name.endswith("_proj.weight")}


# ------------------------------------------------------------------------------------------------------ the references


@every_family
def test_channels_are_those_of_the_reference(family: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    source = tensors_in(models(family))
    found, config = exported(models(family), tmp_path / "out", "fp8-channel")
    matrices = matrices_of(source)
    wanted = {name: tensor for name, tensor in source.items() if name not in matrices}
    for name in matrices:
        wanted[name], wanted[f"{name}_scale"] = fp8_channel_quantize(source[name])
    assert found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    assert "lm_head" in config["quantization_config"]["ignore"]


@every_family
def test_nvfp4_is_that_of_matrices_which_are_one_where_servers_stack_them(
    family: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tensors_in(models(family))
    found, config = exported(models(family), tmp_path / "modelopt", "nvfp4")
    packed, _ = exported(models(family), tmp_path / "packed", "nvfp4:compressed-tensors")
    matrices = matrices_of(source)
    wanted = {name: tensor for name, tensor in source.items() if name not in matrices}
    other = dict(wanted)
    groups = stacks(sorted(matrices))
    for stack in groups:
        rows = [len(source[name]) for name in stack]
        together = torch.cat([source[name] for name in stack])
        codes, scales, whole = fp4_block_quantize(together, rows=(sum(rows),), four_over_six=True)
        for name, own, scale in zip(stack, codes.split(rows), scales.split(rows), strict=True):
            wanted |= {name: own, f"{name}_scale": scale, f"{name}_scale_2": whole[0]}
            other |= {f"{name}_packed": own, f"{name}_scale": scale, f"{name}_global_scale": 1 / whole}
    assert found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)
    assert packed.keys() == other.keys() and all(same_bits(packed[name], other[name]) for name in other)
    assert config["quantization_config"]["config_groups"]["group_0"]["input_activations"] is None
    if family not in ("phi3",):  # which stores them as one
        assert any(len(stack) == 3 for stack in groups) and any(len(stack) == 2 for stack in groups)


def test_blocks_and_nf4_are_those_of_surogate_quantize(tmp_path: Path) -> None:
    """By the codec that quantizes by the ops of any weight format, too."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128}
    model = draw(tmp_path / "model", config_of("llama") | sizes)
    source = tensors_in(model)
    for format, key in (("fp8-blocks", "qlora_fp8"), ("nf4", "qlora_bnb"), ("nvfp4", "qlora_fp4")):
        found, _ = exported(model, tmp_path / format, format)
        run.quantize(str(model), tmp_path / key, [f"{key}=true"], notice=lambda line: None)
        assert contents(tmp_path / format) == contents(tmp_path / key)
        if key == "qlora_fp4":
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("surogate_core.plugins.registry.Registry.export_formats", lambda registry: {})
            run.quantize(str(model), tmp_path / f"{key}-by-ops", [f"{key}=true"], notice=lambda line: None)
        assert contents(tmp_path / format) == contents(tmp_path / f"{key}-by-ops")
        if format == "fp8-blocks":
            name = "model.layers.1.mlp.down_proj.weight"
            codes, scales = fp8_tile_quantize(source[name], rows=(len(source[name]),), tile=128)
            assert same_bits(found[name], codes) and same_bits(found[f"{name}_scale_inv"], scales)


# ---------------------------------------------------------------------------------------------------- readers of others


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize("format", ["fp8-channel", "nvfp4:compressed-tensors"])
def test_compressed_tensors_decompresses_the_reference(
    family: str, format: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="reads the files that it defines: pip install compressed-tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    source = tensors_in(models(family))
    found, config = exported(models(family), tmp_path / "out", format)
    quantization = config["quantization_config"]
    scheme = QuantizationScheme.model_validate(quantization["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(quantization["format"])
    for name in matrices_of(source):
        prefix = name.removesuffix("weight")
        parts = {key.removeprefix(prefix): tensor for key, tensor in found.items() if key.startswith(prefix)}
        theirs = compressor.decompress(parts, scheme)["weight"]
        ours = of_format(format, found, name)
        assert torch.equal(theirs.float(), ours.to(theirs.dtype).float()), name


def of_format(format: str, found: Tensors, name: str) -> Tensor:
    """Return the matrix that the parts in the files hold, by definition, in fp32."""
    if format == "fp8-channel":
        return fp8_channel_dequantize(found[name], found[f"{name}_scale"])
    codes, scales, inverse = (found[f"{name}_{part}"] for part in ("packed", "scale", "global_scale"))
    levels = fp4_block_dequantize(codes, torch.ones(scales.shape), torch.ones(1), rows=(len(codes),), dtype="fp32")
    return levels * (scales.float() / inverse).repeat_interleave(16, dim=1)


@pytest.mark.parametrize("format", ["fp8-channel", "nvfp4:compressed-tensors"])
def test_transformers_computes_with_the_values_of_the_reference(
    format: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """With fp8-channel it rounds activations to FP8 too, each token by its largest."""
    pytest.importorskip("compressed_tensors", reason="transformers loads the files with it")
    from transformers import AutoModelForCausalLM

    source, (found, _) = tensors_in(models("llama")), exported(models("llama"), tmp_path / "out", format)
    values = {name: of_format(format, found, name).bfloat16() for name in matrices_of(source)}
    plain = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.bfloat16)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)(ids).logits.float()
        exact = plain(ids).logits.float()
        plain.load_state_dict({**plain.state_dict(), **values})
        ours = plain(ids).logits.float()
    bound = 0.15 if format == "fp8-channel" else 0.01
    assert (theirs - ours).norm() < bound * ours.norm() < 3 * (ours - exact).norm()


# --------------------------------------------------------------------------------------------------------- sources


def test_a_tower_is_left_as_it_is_and_named(tmp_path: Path) -> None:
    from outer_models import write_outer

    model = write_outer(tmp_path / "model", "gemma3")
    source = tensors_in(model)
    for format in FORMATS:
        found, config = exported(model, tmp_path / format.replace(":", "-"), format)
        ignored = config["quantization_config"]["ignore"]
        tower = [name for name in source if "vision" in name or "projector" in name]
        assert tower and all(same_bits(found[name], source[name]) for name in tower)
        patterns = [p.removeprefix("re:") if p.startswith("re:") else fnmatch.translate(p) for p in ignored]
        assert all(any(re.match(pattern, name) for pattern in patterns) for name in tower)
        assert sum(found[name].dtype not in (torch.float32, torch.bfloat16) for name in found) >= 14
        assert (tmp_path / format.replace(":", "-") / "preprocessor_config.json").exists()


def test_a_model_in_shards_keeps_its_files_and_memory_makes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surogate.checkpoints import rewriting

    model = draw(tmp_path / "model", config_of("llama", layers=4), max_shard_size="100KB")
    files = {path.name for path in model.glob("*.safetensors")}
    assert len(files) > 2
    found, _ = exported(model, tmp_path / "kept", "nvfp4")
    assert {path.name for path in (tmp_path / "kept").glob("*.safetensors")} <= files
    monkeypatch.setattr(rewriting, "HELD_BYTES", 1 << 13)
    again, _ = exported(model, tmp_path / "more", "nvfp4")
    names = sorted(path.name for path in (tmp_path / "more").glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > len(files)
    index = json.loads((tmp_path / "more/model.safetensors.index.json").read_text())
    held = {name: path.name for path in (tmp_path / "more").glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == held and again.keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert all(same_bits(again[name], found[name]) for name in found)


@pytest.mark.parametrize("format", ["hf", *FORMATS])
def test_an_adapter_is_exported_as_the_merged_model_is(
    format: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = models("qwen3")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    )
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    run.merge(tmp_path / "adapter", tmp_path / "merged", notice=lambda line: None)
    exported(tmp_path / "adapter", tmp_path / "one", format)
    exported(tmp_path / "merged", tmp_path / "two", format)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not same_bits(tensors_in(base)[UP], tensors_in(tmp_path / "merged")[UP])


def test_a_model_in_fp8_is_exported_as_its_values_are(models: Callable[[str], Path], tmp_path: Path) -> None:
    """They are read in bf16, as a run reads them."""
    run.quantize(str(models("llama")), tmp_path / "fp8", ["qlora_fp8=true"], notice=lambda line: None)
    run.export(tmp_path / "fp8", tmp_path / "bf16", notice=lambda line: None)
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    for format in FORMATS:
        one, _ = exported(tmp_path / "fp8", tmp_path / f"one-{format.replace(':', '-')}", format)
        two, _ = exported(tmp_path / "bf16", tmp_path / f"two-{format.replace(':', '-')}", format)
        assert one.keys() == two.keys() and all(same_bits(one[name], two[name]) for name in one)


def test_what_is_exported_stops_at_the_end_of_a_turn(models: Callable[[str], Path], tmp_path: Path) -> None:
    from end_to_end.test_turn_ends import make_base_model

    model = Path(shutil.copytree(models("llama"), tmp_path / "model"))
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    end = make_base_model(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary}))
    for format in FORMATS:
        output = tmp_path / format.replace(":", "-")
        exported(model, output, format)
        generation = json.loads((output / "generation_config.json").read_text())
        assert generation == {"top_p": 0.9, "eos_token_id": [0, end]}
        assert (output / "chat_template.jinja").read_text() == (model / "chat_template.jinja").read_text()


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("gguf2", r"export format: gguf2 — no installed plugin provides it. Installed: .*fp8-channel"),
        ("fp8-channel:f32", r"--format fp8-channel:f32: fp8-channel has no types. Use --format fp8-channel."),
        ("nvfp4:x", r"no type 'x'. Use one of nvfp4:modelopt, nvfp4:compressed-tensors."),
        ("fp8-blocks", r"fp8-blocks: model.layers.0.self_attn.q_proj.weight has 64 columns, no multiple of 128, which"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    format: str, message: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        run.export(models("llama"), tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


SIZES: dict[str, tuple[dict[str, Any], str, str]] = {
    "columns of a block": (
        {"hidden_size": 72, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
        "nvfp4",
        r"nvfp4: \S+q_proj.weight has 72 columns, which is no multiple of 16, the block of NVFP4. Use",
    ),
    "sides of a product": (
        {"intermediate_size": 72},
        "fp8-channel",
        r"fp8-channel: \S+_proj.weight is \[72, 64\]; ser",
    ),
    "rows that vLLM stacks": (
        {"hidden_size": 128, "head_dim": 128, "intermediate_size": 192},
        "fp8-blocks",
        r"gate_proj.weight has 192 rows, no multiple of 128, so vLLM cannot stack up_proj below it. Use --format",
    ),
    "columns of nf4": ({"intermediate_size": 96}, "nf4", r"nf4: \S+down_proj.weight has 96 columns, which is no multi"),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_a_format_cannot_hold_are_refused(case: str, tmp_path: Path) -> None:
    sizes, format, message = SIZES[case]
    model = draw(tmp_path / "model", config_of("llama") | sizes)
    with pytest.raises(ConfigError, match=message):
        run.export(model, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_damaged_or_quantized_models_are_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    exported(models("llama"), stored, "nvfp4")
    for format in ("hf", "fp8-channel"):
        done = invoke("export", stored, tmp_path / "out", "--format", format)
        assert_refused(done, "the weights are stored quantized. They cannot be exported in another form: use the origi")
    damaged = Path(shutil.copytree(models("llama"), tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors[name][0, 5] = torch.nan
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    for format in FORMATS:
        done = invoke("export", damaged, tmp_path / "out", "--format", format)
        assert_refused(done, f"{name} holds 1 NaN of 8,192, first at [0, 5]. Use another checkpoint.")
    del tensors[name]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    done = invoke("export", damaged, tmp_path / "out", "--format", "nvfp4")
    assert_refused(done, f"the checkpoint lacks {name}, [128, 64] by config.json")
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    done = invoke("export", damaged, tmp_path / "out", "--format", "nvfp4")
    assert_refused(done, "['OtherForCausalLM']", "no installed plugin builds")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert_refused(invoke("export", stored, tmp_path / "full", "--format", "hf"), "is not empty: it holds file")


@pytest.mark.parametrize("format", ["hf", *FORMATS])
def test_an_interrupted_export_leaves_nothing(
    format: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surogate.checkpoints import rewriting

    write, calls = rewriting.write_safetensors, []

    def interrupted(path: Path, tensors: Any) -> str:
        calls.append(path)
        write(path, tensors)
        raise KeyboardInterrupt

    monkeypatch.setattr(rewriting, "write_safetensors", interrupted)
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        run.export(models("llama"), tmp_path / "out", format=format)
    assert calls and calls[0].is_relative_to(tmp_path / "out") and not (tmp_path / "out").exists()
    assert torch.get_num_threads() == threads


def test_overwrite_sets_all_files_of_a_format_aside(models: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    exported(models("llama"), output, "nvfp4")
    before = contents(output)
    exported(models("llama"), output, "fp8-channel", overwrite=True)
    assert contents(output / "outputs.set_aside") == before
    with pytest.raises(ConfigError, match="is an input, but would be set aside"):
        run.export(output, output, format="hf", overwrite=True)


def test_the_json_of_the_command_names_the_format(models: Callable[[str], Path], tmp_path: Path) -> None:
    done = invoke("export", models("llama"), tmp_path / "out", "--format", "nvfp4", "--json")
    assert json.loads(done.stdout) == {
        "checkpoint": str(models("llama")),
        "output": str(tmp_path / "out"),
        "format": "nvfp4",
    }
