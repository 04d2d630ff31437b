"""Models published in FP8 train as the same values in bf16 do: all weights, adapters, and a base stored in NF4."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace, write_model
from end_to_end.test_qlora import draw
from fp8_checkpoints import SCALE, tensors_of, write_fp8, write_shards, write_twin
from outer_models import write_outer
from torch import Tensor

from surogate import run
from surogate.checkpoints.manifest import read_manifest
from surogate.cli.plan_text import plan_text
from surogate_core.api import ConfigError

BLOCKS: Mapping[str, list[int] | None] = {"blocks": [128, 128], "odd": [48, 32], "rows": [1, 64], "tensor": None}
"""Kinds of checkpoints, by their weight_block_size."""
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose model has sides that no block divides."""
    keys = {"from_scratch": None, "lora_rank": 4, "learning_rate": 1e-2, "eval_steps": 0, "model_dtype": "bf16"}
    workplace = make_workplace(tmp_path_factory.mktemp("forms"), max_steps=2, save_steps=1, **keys)
    draw(write_model(workplace.root / "model", hidden_size=160, intermediate_size=208, head_dim=24))
    return workplace


def published(place: Workplace, kind: str) -> tuple[Path, Path]:
    """Return the model of `place` in FP8, and its twin in bf16."""
    quantized, twin = place.root / kind / "fp8", place.root / kind / "twin"
    if not quantized.exists():
        write_fp8(place.root / "model", quantized, BLOCKS[kind])
        write_twin(quantized, twin)
    return quantized, twin


def trained(place: Workplace, name: str, **keys: Any) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Train into the folder `name`. Return the losses, the weights that are written, and the lines that are shown."""
    output, shown = place.root / name, list[str]()
    run.train(run.load(place.write(output_dir=str(output), **keys), mode="train"), notice=shown.append)
    found = output / "adapter" if (output / "adapter").is_dir() else output
    return losses(output), tensors_of(found), shown


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("blocks", {"lora": False}),
        ("tensor", {"lora": False}),
        ("odd", {"lora": True}),
        ("tensor", {"lora": True}),
        ("blocks", {"lora": True, "qlora_bnb": True, "qlora_bnb_block_size": 64}),
        ("tensor", {"lora": True, "qlora_fp8": True}),
        ("rows", {"lora": True, "model_dtype": "fp32"}),
    ],
)
def test_a_run_has_the_bits_of_one_on_the_values_in_floating_point(
    place: Workplace, kind: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """With all weights, with an adapter, and with an adapter on a base in another format than the files have."""
    if "qlora_bnb" in keys:
        model = draw(write_model(tmp_path / "wide", hidden_size=128, intermediate_size=192, head_dim=32))
        quantized = write_fp8(model, tmp_path / "fp8", BLOCKS[kind])
        twin = write_twin(quantized, tmp_path / "twin")
    else:
        quantized, twin = published(place, kind)
        if keys.get("model_dtype") == "fp32":
            twin = write_twin(quantized, tmp_path / "twin", torch.float32)
    ours = trained(place, str(tmp_path / "ours"), model=str(quantized), **keys)
    theirs = trained(place, str(tmp_path / "theirs"), model=str(twin), **keys)
    assert ours[0] == theirs[0] and equal(ours[1], theirs[1])
    told = [line for line in ours[2] if "weights of the model in FP8" in line]
    assert len(told) == 1 and "read into" in told[0]
    assert not any("FP8 (E4M3)" in line for line in theirs[2])
    if not keys["lora"]:
        config = json.loads((tmp_path / "ours/config.json").read_text())
        assert "quantization_config" not in config and config["dtype"] == "bfloat16"
        assert {x.dtype for x in ours[1].values()} == {torch.bfloat16}


@pytest.mark.parametrize("block", [[32, 64], None])
def test_transformers_reads_the_same_values(block: list[int] | None, tmp_path: Path) -> None:
    """It is a reader of others. It takes all blocks of a matrix to be of one size, so that they must divide it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantized = write_fp8(draw(write_model(tmp_path / "model")), tmp_path / "fp8", block)
    twin = write_twin(quantized, tmp_path / "twin", torch.float32)
    given = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, quantization_config=given)
    values = theirs.state_dict()
    assert [name for name, value in tensors_of(twin).items() if not torch.equal(values[name], value.float())] == []


@pytest.mark.parametrize("keys", [{"lora": False}, {"lora": True, "adapter": "lora"}])
def test_ranks_that_divide_the_weights_read_their_parts(place: Workplace, keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"ranks_per_gpu": 3, "shard_weights": True, "per_device_train_batch_size": 2, "save_steps": 0}
    keys |= {"gradient_accumulation_steps": 1}
    quantized, twin = published(place, "blocks")
    ours, theirs = (trained(place, str(tmp_path / model.name), model=str(model), **keys) for model in (quantized, twin))
    assert ours[0] == theirs[0] and equal(ours[1], theirs[1])


# ------------------------------------------------------------------------------------------------------------- resuming


def resumed(place: Workplace, checkpoint: Path, name: str, **keys: Any) -> tuple[list[float], list[str]]:
    found = trained(place, name, resume_from_checkpoint=str(checkpoint), **keys)
    return found[0], found[2]


def test_a_resumed_run_finds_the_base_it_was_saved_on(place: Workplace, tmp_path: Path) -> None:
    """Also in another folder. On the values in bf16 it continues with the same bits, and says that it cannot know."""
    quantized, twin = published(place, "blocks")
    moved = shutil.copytree(quantized, tmp_path / "moved")
    straight = trained(place, str(tmp_path / "straight"), model=str(quantized), lora=True)[0]
    checkpoint = tmp_path / "straight/step_00000001"
    facts = read_manifest(checkpoint).facts
    assert (facts["base_files"], facts["base_held_as"]) == ("fp8", "bf16")
    assert "model_config.quantization_config" not in facts
    found, shown = resumed(place, checkpoint, str(tmp_path / "again"), model=str(moved), lora=True)
    assert found == straight[1:] and not any("identical" in line for line in shown), shown
    found, shown = resumed(place, checkpoint, str(tmp_path / "on-twin"), model=str(twin), lora=True)
    (line,) = [line for line in shown if "identical if" in line]
    assert found == straight[1:] and "base files in floating point (saved: fp8)" in line


def test_a_run_does_not_resume_on_other_codes(place: Workplace, tmp_path: Path) -> None:
    quantized, _ = published(place, "blocks")
    other = write_fp8(
        draw(shutil.copytree(place.root / "model", tmp_path / "model"), seed=1), tmp_path / "other", [128, 128]
    )
    trained(place, str(tmp_path / "out"), model=str(quantized), lora=True)
    with pytest.raises(ConfigError, match="was saved with base weights"):
        resumed(place, tmp_path / "out/step_00000001", str(tmp_path / "again"), model=str(other), lora=True)


# -------------------------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("kind", ["odd", "tensor"])
def test_an_adapter_names_its_base_and_is_merged_into_a_model_in_bf16(
    place: Workplace, kind: str, tmp_path: Path
) -> None:
    quantized, twin = published(place, kind)
    trained(place, str(tmp_path / "out"), model=str(quantized), lora=True, merge_adapter=True)
    adapter = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(quantized)
    assert run.merge(tmp_path / "out/adapter", tmp_path / "merged") == quantized
    run.merge(tmp_path / "out/adapter", tmp_path / "of-twin", base=str(twin))
    wanted = tensors_of(tmp_path / "of-twin")
    for merged in (tmp_path / "merged", tmp_path / "out/merged"):
        assert equal(tensors_of(merged), wanted)
        config = json.loads((merged / "config.json").read_text())
        assert "quantization_config" not in config and config["dtype"] == config["torch_dtype"] == "bfloat16"
        index = json.loads((merged / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == wanted.keys()
        assert {path.name for path in merged.glob("*.safetensors")} == set(index.values())
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_an_adapter_that_was_trained_on_the_codes_is_merged_too(place: Workplace, tmp_path: Path) -> None:
    quantized, twin = published(place, "blocks")
    keys = {"model": str(quantized), "lora": True, "qlora_fp8": True, "merge_adapter": True}
    shown = trained(place, str(tmp_path / "out"), **keys)[2]
    assert not any("weights of the model in FP8" in line for line in shown)
    told: list[str] = []
    run.merge(tmp_path / "out/adapter", tmp_path / "merged", notice=told.append)
    run.merge(tmp_path / "out/adapter", tmp_path / "of-twin", base=str(twin), notice=lambda line: None)
    wanted = tensors_of(tmp_path / "of-twin")
    assert equal(tensors_of(tmp_path / "merged"), wanted) and equal(tensors_of(tmp_path / "out/merged"), wanted)
    assert told == []


def test_what_no_family_reads_is_written_in_floating_point_or_refused(place: Workplace, tmp_path: Path) -> None:
    """A tensor beside the model's own, such as that of a head that a family ignores, loses no scale."""
    quantized, _ = published(place, "blocks")
    trained(place, str(tmp_path / "out"), model=str(quantized), lora=True)
    more = shutil.copytree(quantized, tmp_path / "more")
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    tensors = {**tensors_of(quantized), "mtp.weight": codes, "mtp.weight_scale_inv": torch.full((1, 1), 0.5)}
    write_shards(more, [tensors])
    run.merge(tmp_path / "out/adapter", tmp_path / "merged", base=str(more))
    written = tensors_of(tmp_path / "merged")
    assert (
        torch.equal(written["mtp.weight"], torch.full((4, 4), 0.5).bfloat16()) and "mtp.weight_scale_inv" not in written
    )
    write_shards(more, [{name: x for name, x in tensors.items() if name != "mtp.weight_scale_inv"}])
    with pytest.raises(ConfigError, match=r"mtp\.weight is stored as F8_E4M3, without what fp8_blocks reads it with"):
        run.merge(tmp_path / "out/adapter", tmp_path / "again", base=str(more))


def test_it_is_quantized_to_another_format_as_its_values_are(place: Workplace, tmp_path: Path) -> None:
    quantized, twin = published(place, "tensor")
    for key in ("qlora_fp4=true", "qlora_fp8=true"):
        ours, theirs = tmp_path / f"ours-{key}", tmp_path / f"theirs-{key}"
        run.quantize(str(quantized), ours, [key])
        run.quantize(str(twin), theirs, [key])
        assert equal_bytes(tensors_of(ours), tensors_of(theirs))
        configs = [json.loads((folder / "config.json").read_text()) for folder in (ours, theirs)]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def equal_bytes(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    bits = [{name: x.contiguous().reshape(-1).view(torch.uint8) for name, x in of.items()} for of in (one, other)]
    return equal(*bits)


def test_a_checkpoint_is_exported_without_the_form(place: Workplace, tmp_path: Path) -> None:
    quantized, _ = published(place, "blocks")
    written = trained(place, str(tmp_path / "out"), model=str(quantized), lora=False)[1]
    run.export(tmp_path / "out/step_00000002", tmp_path / "exported")
    assert equal(tensors_of(tmp_path / "exported"), written)
    assert "quantization_config" not in json.loads((tmp_path / "exported/config.json").read_text())


# ---------------------------------------------------------------------------------------------- a model with a tower


@pytest.fixture(scope="module")
def ministral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Ministral 3 as it is published, with a tower in bf16, and its twin."""
    folder = tmp_path_factory.mktemp("ministral")
    quantized = write_fp8(write_outer(folder / "model", "ministral3"), folder / "fp8", None)
    return quantized, write_twin(quantized, folder / "twin")


@pytest.mark.parametrize("lora", [False, True])
def test_ministral_3_trains_with_its_tower(
    place: Workplace, ministral: tuple[Path, Path], lora: bool, tmp_path: Path
) -> None:
    keys = {"lora": lora, "verify_outputs": True, **({"merge_adapter": True} if lora else {})}
    ours = trained(place, str(tmp_path / ministral[0].name), model=str(ministral[0]), **keys)[:2]
    keys["verify_outputs"] = False  # loading them takes seconds
    theirs = trained(place, str(tmp_path / ministral[1].name), model=str(ministral[1]), **keys)[:2]
    assert ours[0] == theirs[0] and equal(ours[1], theirs[1])
    written, twin = (tensors_of(tmp_path / model.name / ("merged" if lora else "")) for model in ministral)
    assert equal(written, twin) and not any(name.endswith("scale") for name in written)
    towers = [name for name in written if "vision" in name]
    before = tensors_of(ministral[0])
    assert len(towers) > 5 and all(torch.equal(written[name], before[name]) for name in towers)


def test_a_tower_in_fp8_may_not_lose_its_scales(place: Workplace, tmp_path: Path) -> None:
    """A full training would copy it as it is. An adapter changes nothing of it, and a merge reads it."""
    quantized = write_fp8(write_outer(tmp_path / "model", "ministral3"), tmp_path / "fp8", None, towers=True)
    with pytest.raises(ConfigError, match=r"vision_tower.* is stored as F8_E4M3, and outputs, which have no quant"):
        trained(place, str(tmp_path / "full"), model=str(quantized), lora=False)
    trained(place, str(tmp_path / "lora"), model=str(quantized), lora=True, merge_adapter=True)
    merged = tensors_of(tmp_path / "lora" / "merged")
    assert any("vision_tower" in name for name in merged)
    assert not any(tensor.dtype == torch.float8_e4m3fn or "scale" in name for name, tensor in merged.items())


# ------------------------------------------------------------------------------------------------- what does not fit


def test_a_plan_says_what_is_read_and_needs_no_weights(place: Workplace, tmp_path: Path) -> None:
    quantized, twin = published(place, "blocks")
    shutil.copytree(quantized, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors*"))
    for model, told in ((tmp_path / "config", True), (twin, False)):
        opened = run.open_run(run.load(place.write(model=str(model)), mode="sft"))
        lines = "\n".join(plan_text(opened, run.plan(opened, "h200"), "", ""))
        assert (" ".join(lines.split()).count("block of weights: read into bf16") == 1) == told


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qlora_fp8": True}, r"weight_block_size is \[48, 32\]; only squares of 64, 128 or 256"),
        ({"from_scratch": True, "lora": False}, "describes stored weights, but from_scratch: true draws"),
    ],
)
def test_keys_that_do_not_fit_are_refused(place: Workplace, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.plan(run.load(place.write(model=str(published(place, "odd")[0]), **keys), mode="sft"), "h200")


def test_a_run_that_lacks_a_scale_stops_before_it_trains(place: Workplace, tmp_path: Path) -> None:
    lacking = shutil.copytree(published(place, "tensor")[0], tmp_path / "lacking")
    tensors = tensors_of(lacking)
    del tensors[Q + SCALE]
    write_shards(lacking, [tensors])
    with pytest.raises(ConfigError, match=rf"model\.safetensors: {Q} needs {Q}_scale_inv, which the checkpoint lacks"):
        trained(place, str(tmp_path / "out"), model=str(lacking), lora=True)
