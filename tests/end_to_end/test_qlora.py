"""QLoRA: an adapter over a base in a weight format, quantized while it is loaded or stored quantized."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate_core import run
from surogate_core.api import Merge
from surogate_core.checkpoint.stored_base import stored_base
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry

FORMATS = ("qlora_bnb", "qlora_fp8", "qlora_fp4")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose model has weights, drawn by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {"from_scratch": None, "lora_rank": 4, "learning_rate": 1e-2, "eval_steps": 0}
    workplace = make_workplace(tmp_path_factory.mktemp("qlora"), max_steps=4, save_steps=2, **keys)
    torch.manual_seed(0)
    model = workplace.root / "model"
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    drawn.save_pretrained(model, max_shard_size="200KB")
    return workplace


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
    assert loaded[0] == stored[0]
    assert loaded[1].keys() == stored[1].keys()
    assert [name for name in loaded[1] if not torch.equal(loaded[1][name], stored[1][name])] == []


def test_a_stopped_run_resumes_with_the_same_bits(place: Workplace) -> None:
    straight = trained(place, "straight", qlora_bnb=True)
    resumed = trained(
        place, "resumed", qlora_bnb=True, resume_from_checkpoint=str(place.root / "straight/step_00000002")
    )
    assert straight[0][2:] == resumed[0]
    assert all(torch.equal(straight[1][name], resumed[1][name]) for name in straight[1])


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
    ],
)
def test_settings_that_do_not_fit_are_refused(place: Workplace, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.plan(run.load(place.write(**keys), mode="sft"), "h200")


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


def test_a_method_that_no_format_reads_is_refused(place: Workplace, tmp_path: Path) -> None:
    config = json.loads((place.root / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="No installed weight format reads quant_method: gptq"):
        run.plan(run.load(place.write(model=str(tmp_path)), mode="sft"), "h200")


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
    base = stored_base(output / "adapter", place.root / "model", load_registry(), pytest.fail)
    assert base is not None
    assert base.tensors == {
        f"model.layers.{layer}.{name}_proj.weight"
        for layer in (0, 1)
        for name in (*(f"self_attn.{x}" for x in "qkvo"), *(f"mlp.{x}" for x in ("gate", "up", "down")))
    }
    lines: list[str] = []
    run.merge(output / "adapter", tmp_path / "model", notice=lines.append)
    merged = base.watched(Merge(base_model="", changes=dict.fromkeys(("lm_head.weight", *base.tensors), lambda w: w)))
    for change in merged.changes.values():
        change(torch.randn(64, 64))
    assert base.distances.keys() == base.tensors
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
    (line,) = lines
    assert re.search(rf"^not shown: how far the model is from .* because of .*{why}", line) and "\n" not in line, line
    assert (tmp_path / "model/config.json").exists()
