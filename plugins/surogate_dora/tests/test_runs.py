"""Whole runs of DoRA: how magnitudes start, stored and divided weights, resuming, files of PEFT and for PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace
from safetensors.torch import load_file
from torch import Tensor

from surogate import run
from surogate_core.api import ConfigError

KEYS = {"from_scratch": None, "learning_rate": 1e-2, "max_steps": 4, "eval_steps": 0, "validation_split_ratio": 0}
DORA = {"adapter": "dora", "dora_rank": 4}
DIVIDED = {"ranks_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_level": 3}
ONE_STEP = {"learning_rate": 0, "warmup_steps": 0, "max_steps": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose model has weights, drawn by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    workplace = make_workplace(tmp_path_factory.mktemp("dora"), **KEYS)
    torch.manual_seed(0)
    model = workplace.root / "model"
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    drawn.save_pretrained(model)
    return workplace


def train(place: Workplace, name: str, **keys: Any) -> Path:
    """Train into the folder `name`, unless that is done, and return the folder."""
    output = place.root / name
    if not (output / "adapter").exists():
        given = {**DORA, "output_dir": str(output), **keys}
        run.train(run.load(place.write(**given), mode="train"), notice=lambda line: None)
    return output


def adapter(output: Path) -> dict[str, Tensor]:
    return load_file(output / "adapter/adapter_model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    left, right = adapter(one), adapter(other)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="plain"),
        pytest.param({"qlora_bnb": True}, id="nf4"),
        pytest.param({"qlora_bnb": True, "model": "nf4"}, id="stored in nf4", marks=pytest.mark.slow),
        pytest.param({"qlora_fp8": True}, id="fp8", marks=pytest.mark.slow),
        pytest.param(DIVIDED, id="divided"),
        pytest.param({**DIVIDED, "qlora_bnb": True}, id="divided nf4", marks=pytest.mark.slow),
        pytest.param({"offload_weights": True}, id="offloaded", marks=pytest.mark.slow),
    ],
)
def test_a_run_starts_as_its_base_which_lora_does_too(place: Workplace, keys: dict[str, Any]) -> None:
    """m is the norm of what training reads, so y = m / |W| * W x is the base, wherever and however W is held."""
    if keys.get("model"):
        stored = place.root / keys["model"]
        if not stored.exists():
            run.quantize(str(place.root / "model"), stored, ["qlora_bnb=true", "model_dtype=fp32"])
        keys = {**keys, "model": str(stored)}
    name = "-".join(f"{key}={value}".replace("/", "_") for key, value in keys.items()) or "plain"
    dora = train(place, f"{name}-start", **keys, **ONE_STEP)
    lora = train(place, f"{name}-lora", **keys, **ONE_STEP, adapter="lora", dora_rank=None)
    assert losses(dora) == pytest.approx(losses(lora), rel=2e-6)
    weights = load_file(place.root / "model/model.safetensors")
    off = []
    for tensor, magnitude in adapter(dora).items():
        if tensor.endswith("lora_magnitude_vector"):
            weight = weights[tensor.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")]
            off.append(float((magnitude / weight.norm(dim=1) - 1).abs().max()))
    assert len(off) == 2 * 7
    assert max(off) > 1e-4 if "qlora_bnb" in keys or "qlora_fp8" in keys else max(off) < 1e-6


def test_recomputation_and_a_resume_change_no_bit(place: Workplace) -> None:
    straight = train(place, "straight", save_steps=2)
    assert_same(straight, train(place, "recomputed", recompute="true"))
    again = train(place, "resumed", resume_from_checkpoint=str(straight / "step_00000002"), save_steps=2)
    assert losses(straight)[2:] == losses(again)
    assert all(torch.equal(tensor, adapter(again)[name]) for name, tensor in adapter(straight).items())
    assert losses(straight)[-1] < losses(straight)[0]


def test_ranks_that_divide_weights_take_the_steps_of_one(place: Workplace) -> None:
    straight = train(place, "straight", save_steps=2)
    for level in (1, 3):
        together = train(place, f"level-{level}", **{**DIVIDED, "zero_level": level})
        assert losses(together) == pytest.approx(losses(straight), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"model_dtype": "bf16"}, {"model_dtype": "bf16", "recipe": "fp8-hybrid"}])
def test_a_bf16_run_trains_fp32_matrices_near_the_fp32_run(place: Workplace, keys: dict[str, Any]) -> None:
    rounded = train(place, "-".join(keys.values()), **keys)
    assert {tensor.dtype for tensor in adapter(rounded).values()} == {torch.float32}
    assert losses(rounded) == pytest.approx(losses(train(place, "straight", save_steps=2)), rel=5e-3)


def test_a_saved_adapter_is_trained_further_from_its_own_magnitudes(place: Workplace) -> None:
    straight = train(place, "straight", save_steps=2)
    more = train(place, "more", adapter_path=str(straight / "adapter"), **ONE_STEP)
    before, after = adapter(straight), adapter(more)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ConfigError, match=r"adapter_path: .* is an adapter of dora, and this run trains lora\. Set ad"):
        train(place, "other", adapter="lora", dora_rank=None, adapter_path=str(straight / "adapter"))


def test_peft_loads_it_and_merges_it_to_the_same_model(place: Workplace) -> None:
    """A merged weight is rounded once to fp32."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    straight = train(place, "straight", save_steps=2)
    run.merge(straight / "adapter", place.root / "merged", notice=lambda line: None)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(straight / "adapter")
    assert all(module.lora_magnitude_vector for module in theirs.modules() if hasattr(module, "lora_magnitude_vector"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        unmerged = theirs(ids).logits
        ours = AutoModelForCausalLM.from_pretrained(place.root / "merged")(ids).logits
    assert float((ours - unmerged).norm() / unmerged.norm()) < 1e-5
    expected = theirs.merge_and_unload().state_dict()
    merged = load_file(place.root / "merged/model.safetensors")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_peft_is_merged_and_trained_further(place: Workplace, tmp_path: Path, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(place.root / "model")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=rslora, use_dora=True, lora_dropout=0.1, target_modules=["q_proj", "up_proj"]
    )
    theirs = peft.get_peft_model(base, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = theirs.eval()(ids).logits
    run.merge(tmp_path / "theirs", tmp_path / "merged", str(place.root / "model"), notice=lambda line: None)
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    assert float((ours - expected).norm() / expected.norm()) < 1e-5
    keys = {"dora_rank": 3, "dora_alpha": 5, "dora_use_rslora": rslora, "dora_target_modules": ["q_proj", "up_proj"]}
    more = place.write(
        **{**DORA, **keys, **ONE_STEP, "adapter_path": str(tmp_path / "theirs"), "output_dir": str(tmp_path / "more")}
    )
    run.train(run.load(more), notice=lambda line: None)
    saved, again = load_file(tmp_path / "theirs/adapter_model.safetensors"), adapter(tmp_path / "more")
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)


def test_a_gpu_has_a_kernel_for_every_op(place: Workplace) -> None:
    for keys in ({"model_dtype": "bf16"}, {"model_dtype": "fp32"}, {"model_dtype": "bf16", "lora_dtype": "bf16"}):
        planned = run.plan(run.load(place.write(**DORA, **keys)), device="h100")
        assert not planned.kernels.refused
        assert {"dora_magnitude", "dora_norm", "dora_scale_bwd"} <= planned.kernels.providers.keys()
