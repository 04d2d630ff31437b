"""Whole runs of a model whose checkpoints hold the experts of a layer in one tensor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import stacked_family
import torch
from end_to_end.product import Workplace, losses, make_workplace
from end_to_end.several import trained as trained_together
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from surogate import run
from surogate.checkpoints.model_ranges import in_rows
from surogate_core.errors import ConfigError
from surogate_verify.verification import Extent, verify

LORA: dict[str, Any] = {
    "lora": True,
    "lora_rank": 4,
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
WITHOUT = ("SUROGATE_PLUGINS", "-models_gptoss")
"""The environment in which the model is that of a plugin file alone."""
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    keys: dict[str, Any] = {"from_scratch": None, "max_steps": 3, "warmup_steps": 0, "validation_split_ratio": 0}
    root = tmp_path_factory.mktemp("stacks")
    workplace = make_workplace(root, **keys, eval_steps=0, learning_rate=1e-2)
    shutil.rmtree(root / "model")
    stacked_family.write_base(root / "model")
    return workplace


def train(place: Workplace, name: str, **keys: Any) -> Path:
    """Train into the folder `name`, unless that is done, and return the folder."""
    output = place.root / name
    if not output.exists():
        given = {"output_dir": str(output), **keys}
        run.train(run.load(place.write(**given), mode="train"), notice=lambda line: None)
    return output


def weights(folder: Path, name: str = "model") -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def test_stacks_are_read_and_written_without_a_change_of_a_bit(place: Workplace) -> None:
    still = train(place, "still", learning_rate=0, max_steps=1)
    assert equal(weights(place.root / "model"), weights(still))


def test_a_trained_model_is_loaded_by_transformers(place: Workplace) -> None:
    folder = train(place, "normuon", optimizer="normuon")
    assert losses(folder)[-1] < losses(folder)[0]
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    before = weights(place.root / "model")
    assert all((loaded[name] != before[name]).flatten(1).any(1).all() for name in (GATE_UP, DOWN))


@pytest.mark.parametrize("level", [2, 3])
def test_ranks_divide_stacks_and_have_the_bits_of_one(place: Workplace, level: int) -> None:
    """In a process, that then writes whole tensors of the parts of its ranks."""
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "optimizer": "adamw"}
    two = {**keys, "ranks_per_gpu": 2, "zero_level": level}
    divided, straight = train(place, f"level{level}", **two), train(place, "two", **keys, ranks_per_gpu=2)
    assert losses(divided) == losses(straight) and equal(weights(divided), weights(straight))


@pytest.mark.slow
def test_several_processes_write_resume_and_export_their_parts_of_stacks(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 4, "save_steps": 2}
    alone = train(place, "alone", **keys, zero_level=3, ranks_per_gpu=2)
    here = Workplace(place.root, {**place.config, **keys, "zero_level": 3, "output_dir": str(place.root / "together")})
    trained_together(here, **keys)
    assert equal(weights(here.out), weights(alone)), "of two processes"
    checkpoint = here.out / "step_00000002"
    assert GATE_UP in in_rows(checkpoint)
    with monkeypatch.context() as without:
        without.setenv(*WITHOUT)
        run.export(checkpoint, place.root / "exported", config=place.write(plugins=[stacked_family.__file__]))
        with pytest.raises(ConfigError, match=r"no installed package, .* builds GptOssForCausalLM"):
            run.export(checkpoint, place.root / "without")
    assert equal(weights(place.root / "exported"), weights(alone / "step_00000002"))
    resumed = Workplace(place.root, {**here.config, "output_dir": str(place.root / "resumed")})
    trained_together(resumed, **keys, resume_from_checkpoint=str(checkpoint))
    assert equal(weights(resumed.out), weights(alone)), "resumed"


# ------------------------------------------------------------------------------------------------------------ adapters


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(40, 72)[None]).logits
        return found


def base_of(place: Workplace) -> Any:
    return AutoModelForCausalLM.from_pretrained(place.root / "model", dtype=torch.float32)


def test_an_adapter_of_experts_is_pefts_and_merged_has_its_logits(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    folder = train(place, "lora", **LORA, merge_adapter=True, verify_outputs=True)
    assert losses(folder)[-1] < losses(folder)[0]
    theirs = peft.PeftModel.from_pretrained(base_of(place), folder / "adapter")
    wanted = logits(theirs)
    assert not torch.allclose(wanted, logits(base_of(place)), atol=1e-2)
    monkeypatch.setenv(*WITHOUT)
    run.merge(folder / "adapter", place.root / "by-command", config=place.write(plugins=[stacked_family.__file__]))
    for merged in (folder / "merged", place.root / "by-command"):
        found = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match=r"has adapters of experts, mlp.experts.* builds GptOssForCausalLM"):
        run.merge(folder / "adapter", place.root / "without")


def test_an_adapter_of_experts_is_resumed_and_trained_further(place: Workplace) -> None:
    straight = train(place, "straight", **LORA, save_steps=1)
    shutil.copytree(straight / "step_00000002", place.root / "resumed-lora/step_00000002")
    given = {"output_dir": str(place.root / "resumed-lora"), "resume_from_checkpoint": True}
    run.train(run.load(place.write(**LORA, **given, save_steps=1), mode="train"), notice=lambda line: None)
    resumed = place.root / "resumed-lora"
    assert equal(weights(resumed / "adapter", "adapter_model"), weights(straight / "adapter", "adapter_model"))
    still = {**LORA, "adapter_path": str(straight / "adapter"), "learning_rate": 0, "max_steps": 1}
    again = train(place, "again", **still)
    assert equal(weights(again / "adapter", "adapter_model"), weights(straight / "adapter", "adapter_model"))
    assert losses(again)[0] < losses(straight)[0]


VERIFIED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all weights": ({}, {GATE_UP, DOWN, f"{GATE_UP}_bias"}),
    "experts": (LORA, {f"{name}.lora_{x}_experts" for name in (GATE_UP, DOWN) for x in "AB"}),
    "a router": (
        {"lora": True, "lora_target_modules": ["router", "q_proj"]},
        {f"model.layers.0.mlp.router.lora_{x}" for x in "AB"},
    ),
}


@pytest.mark.parametrize("case", VERIFIED)
def test_gradients_are_those_of_transformers_and_peft(place: Workplace, case: str) -> None:
    pytest.importorskip("peft")
    keys, wanted = VERIFIED[case]
    result = verify(place.write(**keys), ["model_dtype=fp32"], Extent(), notice=lambda line: None)
    assert result.passed, result.first_wrong
    assert wanted <= {row.name for row in result.verdict.rows if row.kind == "gradient"}


# ------------------------------------------------------------------------------------------------------ weight formats


FORMATS = {"qlora_bnb": "bitsandbytes", "qlora_fp8": "fp8", "qlora_fp4": "modelopt"}


@pytest.mark.parametrize("key", FORMATS)
def test_a_stack_is_quantized_by_the_matrices_of_its_experts(place: Workplace, key: str) -> None:
    """A run on the stack and one on the quantized checkpoint, which has a matrix for each expert, are the same.

    In FP4 they are close: attention's matrices have other scales in files.
    """
    told: list[str] = []
    folder = place.root / key
    words = [f"{key}=true", "model_dtype=bf16"]
    run.quantize(str(place.root / "model"), folder, words, notice=told.append)
    assert any(
        f"{GATE_UP} is written as 5 matrices, {GATE_UP}.0 and on, which transformers does not read" in t for t in told
    )
    held, before = weights(folder), weights(place.root / "model")
    assert GATE_UP not in held and held[f"{GATE_UP}.4"].numel() in (128 * 64, 128 * 32)
    assert torch.equal(held[f"{GATE_UP}_bias"], before[f"{GATE_UP}_bias"])
    keys = {**LORA, key: True, "model_dtype": "bf16"}
    on_stack = train(place, f"{key}-on-stack", **keys)
    assert losses(on_stack)[-1] < losses(on_stack)[0]
    on_matrices = train(place, f"{key}-on-matrices", **keys, model=str(folder))
    if key == "qlora_fp4":  # files share the scales of q, k and v, as servers do
        assert losses(on_stack) == pytest.approx(losses(on_matrices), rel=2e-2)
        return
    assert losses(on_stack) == losses(on_matrices)
    one, other = (weights(out / "adapter", "adapter_model") for out in (on_stack, on_matrices))
    assert equal(one, other)


def test_a_quantized_stack_without_one_of_its_experts_is_refused_by_name(place: Workplace, tmp_path: Path) -> None:
    words = ["qlora_fp8=true"]
    run.quantize(str(place.root / "model"), tmp_path / "fp8", words, notice=lambda line: None)
    held = weights(tmp_path / "fp8")
    keys = {**LORA, "qlora_fp8": True, "model": str(tmp_path / "fp8"), "output_dir": str(tmp_path / "out")}
    for change, message in (
        ({f"{GATE_UP}.3": None}, rf"lacks {GATE_UP}\.3,"),
        ({f"{GATE_UP}.5": held[f"{GATE_UP}.3"]}, rf"holds {GATE_UP}\.5,"),
        ({f"{GATE_UP}.3": held[f"{GATE_UP}.3"].float()}, rf"{GATE_UP}\.0 is quantized and {GATE_UP}\.3 is not"),
        ({f"{GATE_UP}.3": held[f"{GATE_UP}.3"][:5]}, rf"{GATE_UP}\.3: must be E4M3 \[128, 64\], found .* \[5, 64\]"),
    ):
        changed = {name: x.clone() for name, x in (held | change).items() if x is not None}
        save_file(changed, tmp_path / "fp8/model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            run.train(run.load(place.write(**keys), mode="train"), notice=lambda line: None)


def test_transformers_does_not_read_a_quantized_stack(place: Workplace) -> None:
    """As the notice says. If it does one day, this fails, and the notice goes."""
    folder = place.root / "in-nf4"
    words = ["qlora_bnb=true"]
    run.quantize(str(place.root / "model"), folder, words, notice=lambda line: None)
    _, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {GATE_UP, DOWN} <= set(found["missing_keys"])


def test_a_stack_has_the_codes_of_its_experts_alone(place: Workplace) -> None:
    import bitsandbytes as bnb

    folder = place.root / "plain-nf4"
    words = [
        "qlora_bnb=true",
        "qlora_bnb_double_quant=false",
        "model_dtype=fp32",
    ]
    run.quantize(str(place.root / "model"), folder, words, notice=lambda line: None)
    held, before = weights(folder), weights(place.root / "model")
    codes, state = bnb.functional.quantize_4bit(before[GATE_UP][3].T.contiguous(), quant_type="nf4")
    assert torch.equal(held[f"{GATE_UP}.3"], codes) and torch.equal(held[f"{GATE_UP}.3.absmax"], state.absmax)


def test_the_distance_of_a_merged_stack_from_the_stored_base_is_told(place: Workplace) -> None:
    folder, told = train(place, "merged-nf4", **LORA, qlora_bnb=True), list[str]()
    run.merge(folder / "adapter", place.root / "of-nf4", config=place.write(**LORA, qlora_bnb=True), notice=told.append)
    assert any("the merged matrices differ from that base with the adapter by" in line for line in told)
    result = verify(
        place.write(**LORA, qlora_bnb=True), ["model_dtype=bf16"], Extent(layers=1), notice=lambda line: None
    )
    assert result.passed, result.first_wrong


@pytest.mark.slow
@pytest.mark.parametrize("key", FORMATS)
def test_processes_divide_quantized_stacks(place: Workplace, key: str) -> None:
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, **LORA, key: True, "zero_level": 3}
    keys["model_dtype"] = "bf16"
    alone = train(place, f"{key}-alone", **keys, ranks_per_gpu=2)
    files = place.root / f"{key}-files"
    words = [f"{key}=true", "model_dtype=bf16"]
    run.quantize(str(place.root / "model"), files, words, notice=lambda line: None)
    for name, model in (("stack", place.root / "model"), ("matrices", files)):
        output = place.root / f"{key}-together-{name}"
        here = Workplace(place.root, {**place.config, **keys, "model": str(model), "output_dir": str(output)})
        trained_together(here, **keys, max_steps=3)
        if (key, name) == ("qlora_fp4", "matrices"):  # files share the scales of q, k and v
            assert losses(here.out) == pytest.approx(losses(alone), rel=2e-2)
            continue
        of_two, of_one = (weights(folder / "adapter", "adapter_model") for folder in (here.out, alone))
        assert losses(here.out) == losses(alone) and equal(of_two, of_one)


@pytest.mark.parametrize("format", ["fp8-channel", "fp8-blocks", "nvfp4", "nvfp4:compressed-tensors", "nf4"])
def test_a_format_of_servers_refuses_stacks_by_name_before_it_writes(place: Workplace, format: str) -> None:
    with pytest.raises(ConfigError, match=rf"{GATE_UP} is a stack of matrices.*Use --format hf") as refused:
        run.export(place.root / "model", place.root / "served", format=format, config=place.write())
    assert "\n" not in str(refused.value) and not (place.root / "served").exists()
    run.export(place.root / "model", place.root / f"hf-{format}", format="hf", config=place.write())
    assert equal(weights(place.root / "model"), weights(place.root / f"hf-{format}"))
