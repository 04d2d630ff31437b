"""Models with a tower: the text is trained, everything else of the base is in every output, byte for byte."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, assert_refused, invoke, losses, make_workplace
from outer_models import LOADER, OUTER, TEXT, write_outer
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate import run
from surogate.checkpoints.base import open_base
from surogate.checkpoints.base_files import kept_tensors, stored_names
from surogate.checkpoints.model_ranges import join_ranges, write_ranges
from surogate.checkpoints.saved_run import model_export
from surogate.runs.saved_values import output_params
from surogate_core.api import ConfigError
from surogate_core.runtime.pieces import Pieces

KEYS: dict[str, Any] = {"from_scratch": None, "max_steps": 3, "save_steps": 2, "warmup_steps": 0, "eval_steps": 0}
LORA: dict[str, Any] = {"lora": True, "lora_rank": 4, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("outer"), **KEYS)


def base(place: Workplace, kind: str) -> Path:
    folder = place.root / kind
    return folder if folder.exists() else write_outer(folder, kind)


def train(place: Workplace, name: str, kind: str, **keys: Any) -> Path:
    """Train into the folder `name`, unless that is done, and return the folder. Its outputs are loaded once."""
    output = place.root / name
    if not output.exists():
        given = {"model": str(base(place, kind)), "output_dir": str(output), "verify_outputs": True, **keys}
        with (place.root / f"{name}.txt").open("w") as notices:
            run.train(run.load(place.write(**given), mode="train"), notice=lambda line: print(line, file=notices))
    return output


def said(place: Workplace, name: str) -> str:
    return (place.root / f"{name}.txt").read_text()


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def is_text(name: str) -> bool:
    return not re.match(r"(model\.)?(multi_modal_projector|visual|vision_\w+|connector)\.", name)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- full training


@pytest.mark.parametrize("kind", OUTER)
def test_outputs_and_checkpoints_have_the_tower_and_the_names_of_their_base(place: Workplace, kind: str) -> None:
    """The check at the end of the run has loaded the output as the outer class."""
    output = train(place, f"full {kind}", kind)
    before = weights(base(place, kind))
    for folder in (output, output / "step_00000002"):
        after = weights(folder)
        assert after.keys() == before.keys()
        same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
        assert same == {name for name in before if not is_text(name)}
        assert config_of(folder) == config_of(base(place, kind)) | {"torch_dtype": "float32"}
        assert (folder / "preprocessor_config.json").read_bytes() == (
            base(place, kind) / "preprocessor_config.json"
        ).read_bytes()
    assert len(re.findall("are not trained; every output has those of the base", said(place, f"full {kind}"))) == 1


@pytest.mark.parametrize("kind", OUTER)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(place: Workplace, kind: str) -> None:
    straight = train(place, f"full {kind}", kind)
    keys = {"resume_from_checkpoint": str(straight / "step_00000002"), "verify_outputs": False}
    resumed = train(place, f"resumed {kind}", kind, **keys)
    one, same = weights(straight), weights(resumed)
    assert one.keys() == same.keys() and all(torch.equal(tensor, same[name]) for name, tensor in one.items())


def test_an_exported_checkpoint_has_the_tower(place: Workplace) -> None:
    checkpoint = train(place, "full gemma3", "gemma3") / "step_00000002"
    run.export(checkpoint, place.root / "exported", notice=lambda line: None)
    assert (place.root / "exported/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_ranges_that_several_processes_write_are_joined_with_the_tower(place: Workplace, tmp_path: Path) -> None:
    opened = run.open_run(run.load(place.write(model=str(base(place, "gemma3"))), mode="train"))
    plan = run.plan(opened, "h200")
    params = {v.name: torch.zeros(v.shape) for v in output_params(plan.assembly, adapter=False)}
    pieces = {name: Pieces.of(tensor) for name, tensor in params.items()}
    open_base(opened, plan.assembly.weights).load(pieces)
    export = model_export(opened, plan, pieces)
    for folder in ("ranges", "joined"):
        (tmp_path / folder).mkdir()
    write_ranges(tmp_path / "ranges", export, 0)
    write_ranges(tmp_path / "ranges", replace(export, params={}), 1)
    join_ranges(tmp_path / "joined", tmp_path / "ranges")
    before, after = weights(base(place, "gemma3")), weights(tmp_path / "joined")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", OUTER)
def test_the_text_computes_what_the_outer_class_computes(place: Workplace, kind: str) -> None:
    """Losses, logits and every gradient, by `surogate verify`."""
    path = place.write(model=str(base(place, kind)))
    done = invoke("verify", path, "--rows", "1")
    assert done.returncode == 0 and re.search(r"pass: all \d+ within bounds", done.stdout), done.stdout + done.stderr


def test_a_plan_says_what_is_kept_and_how_much_a_run_writes(place: Workplace) -> None:
    path, device = place.write(model=str(base(place, "gemma3"))), ("--device", "h200")
    plan = json.loads(invoke("plan", path, *device, "--json").stdout)["disk"]
    before = weights(base(place, "gemma3"))
    assert plan["kept"] == sum(tensor.nbytes for name, tensor in before.items() if not is_text(name))
    assert plan["outputs"] == sum(tensor.nbytes for tensor in before.values())
    text = " ".join(invoke("plan", path, *device).stdout.split())
    assert "kept from the base, not trained: model.vision_tower.*, model.multi_modal_projector.* (" in text
    for stored in base(place, "gemma3").glob("*"):
        if stored.name in ("config.json",):
            (place.root / "no weights").mkdir()
            shutil.copy(stored, place.root / "no weights")
    path = place.write(model=str(place.root / "no weights"))
    assert json.loads(invoke("plan", path, *device, "--json").stdout)["disk"]["kept"] is None


def test_a_published_config_with_the_keys_of_the_text_at_its_top_is_read(place: Workplace, tmp_path: Path) -> None:
    """As those of Qwen2.5-VL are. What is trained is the same, and so is the config of the output but for its form."""
    nested = config_of(base(place, "qwen2_5_vl"))
    flat = {**nested.pop("text_config"), **nested}
    shutil.copytree(base(place, "qwen2_5_vl"), tmp_path / "flat")
    (tmp_path / "flat/config.json").write_text(json.dumps(flat))
    output = train(place, "flat", "qwen2_5_vl", model=str(tmp_path / "flat"))
    assert losses(output) == losses(train(place, "full qwen2_5_vl", "qwen2_5_vl"))
    assert config_of(output) == flat | {"torch_dtype": "float32"}


def test_heads_that_predict_further_tokens_are_kept_where_a_base_has_them(place: Workplace) -> None:
    """transformers ignores those of Qwen3.5, so that what it writes lacks them. Both kinds of base train."""
    assert not any(name.startswith("mtp.") for name in weights(base(place, "qwen3_5")))
    folder = place.root / "with heads"
    shutil.copytree(base(place, "qwen3_5"), folder)
    heads = {f"mtp.{name}": torch.randn(8, 8).bfloat16() for name in ("fc.weight", "layers.0.mlp.up_proj.weight")}
    save_file(weights(folder) | heads, folder / "model.safetensors", {"format": "pt"})
    full = train(place, "full with heads", "qwen3_5", model=str(folder))
    adapter = train(place, "adapter with heads", "qwen3_5", model=str(folder), **LORA, verify_outputs=False)
    run.merge(adapter / "adapter", place.root / "merged with heads", notice=lambda line: None)
    for output in (full, full / "step_00000002", place.root / "merged with heads"):
        found = weights(output)
        assert all(torch.equal(found[name], head) and found[name].dtype == head.dtype for name, head in heads.items())
    assert losses(full) == losses(train(place, "full qwen3_5", "qwen3_5"))


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("kind", OUTER)
def test_an_adapter_is_pefts_of_the_outer_class_without_its_tower(place: Workplace, kind: str) -> None:
    import peft
    import transformers

    output = train(place, f"adapter {kind}", kind, **LORA, verify_outputs=False)
    model = getattr(transformers, LOADER).from_pretrained(base(place, kind), dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(model, output / "adapter")
    adapted = {name for name, _ in wrapped.named_modules() if name.endswith("lora_A")}
    assert adapted and all(is_text(name.removeprefix("base_model.model.")) for name in adapted)
    merged = place.root / f"merged {kind}"
    run.merge(output / "adapter", merged, notice=lambda line: None)
    before, after = weights(base(place, kind)), weights(merged)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if not is_text(name))
    again = getattr(transformers, LOADER).from_pretrained(merged, dtype=torch.float32)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        one, other = (m.eval()(input_ids=ids).logits for m in (wrapped, again))
    assert (one - other).abs().max() < 1e-4 * one.abs().max()


def test_an_adapter_is_trained_further(place: Workplace) -> None:
    output = train(place, "adapter gemma3", "gemma3", **LORA, verify_outputs=False)
    still = LORA | {"learning_rate": 0, "max_steps": 1, "save_steps": 0, "verify_outputs": False}
    again = train(place, "further", "gemma3", **still, adapter_path=str(output / "adapter"))
    one, same = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (output, again))
    assert one.keys() == same.keys() and all(torch.equal(tensor, same[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("key", "dtype"), [("qlora_bnb", "bf16"), ("qlora_fp8", "bf16")])
def test_a_quantized_base_has_its_tower_and_trains_as_one_that_the_run_stores(
    place: Workplace, key: str, dtype: str
) -> None:
    stored = place.root / f"stored {key}"
    loaded = [f"{key}=true", f"model_dtype={dtype}"]
    run.quantize(str(base(place, "gemma3")), stored, loaded, notice=lambda line: None)
    before, after = weights(base(place, "gemma3")), weights(stored)
    towers = [name for name in before if not is_text(name)]
    assert towers and all(torch.equal(before[name], after[name]) for name in towers)
    left = json.dumps(config_of(stored)["quantization_config"])
    assert '"model.vision_tower"' in left and '"model.multi_modal_projector"' in left
    keys = {**LORA, key: True, "model_dtype": dtype, "verify_outputs": False, "save_steps": 0}
    one = train(place, f"as it trains {key}", "gemma3", **keys)
    other = train(place, f"as stored {key}", "gemma3", **keys, model=str(stored))
    assert losses(one) == losses(other)


# ----------------------------------------------------------------------------------------------------------- bad input


def without(place: Workplace, folder: str, lacks: str) -> Path:
    """Return a copy of the Gemma 3 without the tensors whose names contain `lacks`."""
    shutil.copytree(base(place, "gemma3"), place.root / folder)
    held = {name: tensor for name, tensor in weights(place.root / folder).items() if not re.search(lacks, name)}
    save_file(held, place.root / folder / "model.safetensors", {"format": "pt"})
    return place.root / folder


def test_a_truncated_tower_is_refused_before_the_first_step(place: Workplace) -> None:
    folder = without(place, "truncated", r"layers\.0\.mlp\.fc1\.bias")
    keys = {"model": str(folder), "output_dir": str(place.root / "none"), "verify_outputs": True}
    done = place.surogate("train", place.write(**keys))
    assert_refused(done, "truncated: does not load in transformers: missing keys: model.vision_tower", "fc1.bias")
    assert "step 1/" not in done.stdout


def test_a_checkpoint_of_the_text_alone_is_refused(place: Workplace) -> None:
    folder = without(place, "text alone", r"vision_tower|multi_modal")
    keys = {"model": str(folder), "output_dir": str(place.root / "none"), "verify_outputs": False}
    with pytest.raises(ConfigError, match=r"has no tensors vision_tower\.\*, which Gemma3ForConditionalGeneration has"):
        run.train(run.load(place.write(**keys), mode="train"), notice=lambda line: None)


def test_a_text_model_with_tensors_of_another_part_is_refused(place: Workplace) -> None:
    """A text model of Qwen3.5 has no head for further tokens, and would lose one."""
    folder = place.root / "text with heads"
    shutil.copytree(base(place, "qwen3_5"), folder)
    text = {name.replace("language_model.", ""): x for name, x in weights(folder).items() if is_text(name)}
    save_file(text | {"mtp.fc.weight": torch.zeros(8, 8)}, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["Qwen3_5ForCausalLM"], **config_of(folder)["text_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    keys = {"model": str(folder), "output_dir": str(place.root / "none"), "verify_outputs": False}
    with pytest.raises(ConfigError, match=r"mtp\.fc\.weight"):
        run.train(run.load(place.write(**keys), mode="train"), notice=lambda line: None)


def test_what_a_base_may_lack_is_kept_if_it_is_there(place: Workplace) -> None:
    """Published files may have layers that predict further tokens, which files of transformers do not have."""
    with_more = shutil.copytree(base(place, "gemma3"), place.root / "with more")
    held, more = weights(with_more), {"mtp.norm.weight": torch.randn(64)}
    save_file(held | more, with_more / "model.safetensors", {"format": "pt"})
    patterns = ("vision_tower.*", "mtp.*")
    for name, folder in (("with", with_more), ("without", base(place, "gemma3"))):
        loaded = run.load(place.write(model=str(folder), output_dir=str(place.root / name)), mode="train")
        opened = run.open_run(loaded, ["*.json", "*.safetensors"])
        names = stored_names(opened, opened.model.weights(opened.dims))
        kept = {"kept_tensors": lambda d: patterns, "may_lack": lambda d: patterns[1:]}
        found = kept_tensors(replace(opened, model=replace(opened.model, **kept)), names)
        assert ("mtp.norm.weight" in [tensor.name for tensor in found]) == (name == "with")
        assert len(found) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"text_config: must be the config of the text model \(got None\)"),
        (
            {"text_config": TEXT | {"model_type": "gemma2"}},
            r"text_config.model_type: must be gemma3_text \(got 'gemma2'",
        ),
        ({"text_config": TEXT | {"head_dim": 0}}, r"text_config.head_dim: must be a whole number"),
        ({"vision_config": None}, r"vision_config: is required by Gemma3ForConditionalGeneration"),
        ({"audio_config": {"hidden_size": 8}}, r"audio_config: Gemma3ForConditionalGeneration has no such part here"),
    ],
)
def test_a_config_of_another_kind_is_refused_by_its_key(
    place: Workplace, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = config_of(base(place, "gemma3")) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        run.open_run(run.load(place.write(model=str(tmp_path)), mode="train"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"from_scratch": True}, "from_scratch: true draws new weights, but Gemma3ForConditionalGeneration also has"),
        ({"loss": "reward"}, "loss: reward: is not built for models with towers"),
    ],
)
def test_what_towers_cannot_be_combined_with_is_refused(place: Workplace, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.plan(run.load(place.write(model=str(base(place, "gemma3")), **keys), mode="train"), "h200")
