"""A mixture whose experts are one tensor for a layer, as published, and the same as transformers writes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, assert_refused, losses, make_workplace
from outer_models import STACKED, write_outer
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate import run
from surogate.checkpoints.base_files import moved_in
from surogate.runs.published_weights import in_form_of
from surogate_core.api import ConfigError
from surogate_core.plugins.discovery import load_registry
from surogate_models_hybrid.plugin import SUROGATE_EXAMPLES
from surogate_models_hybrid.qwen3_5_moe import QWEN3_5_MOE_OUTER

SPLIT = "qwen3_5_moe"
KEYS: dict[str, Any] = {"from_scratch": None, "max_steps": 2, "save_steps": 0, "warmup_steps": 0, "eval_steps": 0}
LAYER = "model.language_model.layers.1.mlp.experts"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA: dict[str, Any] = {"lora": True, "lora_rank": 4, "learning_rate": 1e-2, "lora_target_parameters": EXPERTS}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = make_workplace(tmp_path_factory.mktemp("published"), **KEYS)
    for kind in (SPLIT, STACKED):
        write_outer(place.root / kind, kind)
    return place


def train(place: Workplace, name: str, base: Path, **keys: Any) -> Path:
    output = place.root / name
    if not output.exists():
        given = {"model": str(base), "output_dir": str(output), "verify_outputs": False, **keys}
        run.train(run.load(place.write(**given), mode="train"), notice=lambda line: None)
    return output


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def unstacked(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a matrix for each expert and projection."""
    found = {}
    for name, tensor in held.items():
        module, _, which = name.rpartition(".")
        if which == "gate_up_proj":
            for e, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                found |= {f"{module}.{e}.gate_proj.weight": gate, f"{module}.{e}.up_proj.weight": up}
        elif which == "down_proj":
            found |= {f"{module}.{e}.down_proj.weight": matrix for e, matrix in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def test_both_forms_train_to_the_same_bits(place: Workplace) -> None:
    split, stacked = (train(place, f"full {kind}", place.root / kind) for kind in (SPLIT, STACKED))
    assert losses(split) == losses(stacked)
    trained = weights(stacked)
    assert trained["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 128, 64)
    assert_same(unstacked(trained), weights(split))


@pytest.mark.parametrize("key", [None, "qlora_bnb", "qlora_fp8"])
def test_adapters_of_experts_are_those_of_the_other_form(place: Workplace, key: str | None) -> None:
    """PEFT names the parameter of the class, whatever files hold. So an adapter merges into either form.

    A weight format rounds gate and up of an expert as one matrix where files hold them as one.
    """
    more: dict[str, Any] = {} if key is None else {key: True, "model_dtype": "bf16"}
    outputs = [train(place, f"{key} {kind}", place.root / kind, **LORA, **more) for kind in (SPLIT, STACKED)]
    assert losses(outputs[0]) == pytest.approx(losses(outputs[1]), rel=0 if key is None else 5e-3)
    saved = [load_file(output / "adapter/adapter_model.safetensors") for output in outputs]
    assert any(".experts." in name for name in saved[0])
    assert saved[0].keys() == saved[1].keys()
    if key is None:
        assert_same(*saved)
        merged = [place.root / f"merged {kind}" for kind in (SPLIT, STACKED)]
        for folder, base, output in zip(merged, (SPLIT, STACKED), reversed(outputs), strict=True):
            run.merge(output / "adapter", folder, str(place.root / base), notice=lambda line: None)
        changed = weights(merged[1])
        assert_same(unstacked(changed), weights(merged[0]))
        assert not torch.equal(changed[f"{LAYER}.gate_up_proj"], weights(place.root / STACKED)[f"{LAYER}.gate_up_proj"])


def test_a_stack_that_is_missing_or_of_another_shape_is_named(place: Workplace, tmp_path: Path) -> None:
    for name, change, message in (
        ("missing", None, rf"{LAYER}\.down_proj"),
        ("fewer", lambda x: x[:3].contiguous(), rf"{LAYER}\.down_proj is \[3, 64, 64\], expected \[4, 64, 64\]"),
    ):
        folder = shutil.copytree(place.root / STACKED, tmp_path / name)
        held = weights(folder)
        whole = held.pop(f"{LAYER}.down_proj")
        if change is not None:
            held[f"{LAYER}.down_proj"] = change(whole)
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            train(place, name, folder)


def test_the_form_is_that_of_which_files_hold_the_most() -> None:
    (config,) = SUROGATE_EXAMPLES[f"model {SPLIT}"]
    model = QWEN3_5_MOE_OUTER
    d = model.dims(config)
    split, (stacked,) = model.weights(d), model.published_weights(d)
    for given, other in ((split, stacked), (stacked, split)):
        held = {tensor.name for m in given for tensor in m.tensors}
        found = in_form_of(model, d, held | {"model.visual.a", "mtp.fc.weight"})
        assert list(found.weights(d)) == list(given)
        assert list(found.published_weights(d)[0]) == list(other)
        assert in_form_of(found, d, held).weights(d) == found.weights(d)
    assert in_form_of(model, d, ()) is model
    assert [m.param for m in split] == [m.param for m in stacked]


def test_rows_that_several_processes_wrote_are_in_the_form_that_they_name(place: Workplace) -> None:
    """A checkpoint has only tensors with a layout in the order of the program."""
    registry = load_registry(files=())
    held = weights(place.root / STACKED)
    names = [name for name in held if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]
    assert len(names) == 4
    moved = moved_in(place.root / STACKED, names, registry)
    assert {name: tensor.shape for name, tensor in moved.items()} == {name: held[name].shape for name in names}


def test_a_checkpoint_of_the_text_class_is_refused_by_what_it_lacks(place: Workplace, tmp_path: Path) -> None:
    """Its tensors have the names of the text class, and there is no tower."""
    folder = shutil.copytree(place.root / STACKED, tmp_path / "text")
    held = {name.replace("language_model.", ""): x for name, x in weights(folder).items() if ".visual." not in name}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no tensors model\.visual\.\*, which Qwen3_5MoeForConditionalGen"):
        train(place, "text", folder)
    config = json.loads((folder / "config.json").read_text())
    text = {"architectures": ["Qwen3_5MoeForCausalLM"], **config["text_config"]}
    (folder / "config.json").write_text(json.dumps(text))
    assert losses(train(place, "as text", folder)) == losses(train(place, f"full {STACKED}", place.root / STACKED))


@pytest.mark.slow
def test_a_truncated_tower_is_refused_before_the_first_step(place: Workplace, tmp_path: Path) -> None:
    folder = shutil.copytree(place.root / STACKED, tmp_path / "truncated")
    held = {name: x for name, x in weights(folder).items() if name != "model.visual.blocks.0.norm2.bias"}
    assert len(held) == len(weights(folder)) - 1
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    keys = {"model": str(folder), "output_dir": str(tmp_path / "none"), "verify_outputs": True}
    done = place.surogate("train", place.write(**keys))
    assert_refused(done, "truncated: does not load in transformers: missing keys: model.visual.blocks.0.norm2.bias")
    assert "step 1/" not in done.stdout


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "a.png"}}])
def test_rows_with_images_are_refused_by_their_place(place: Workplace, tmp_path: Path, part: dict[str, Any]) -> None:
    rows = tmp_path / "rows.jsonl"
    content = [part, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A sea."}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    keys = {"datasets": [{"path": str(rows), "type": "conversation"}], "model": str(place.root / STACKED)}
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: .*message 0, part 0 .*image"):
        run.train(run.load(place.write(**keys), mode="train"), notice=lambda line: None)
