"""Runs of a tiny Qwen3-Next: compared with transformers and PEFT, merged, quantized; its further layer is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, invoke, losses, make_workplace, write_model
from outer_models import EXPERTS, HYBRID, TEXT
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate import run

KEYS: dict[str, Any] = {"from_scratch": None, "max_steps": 2, "save_steps": 0, "warmup_steps": 0, "eval_steps": 0}
LORA: dict[str, Any] = {"lora": True, "lora_rank": 4, "learning_rate": 1e-2}
HEADS = ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """One layer has no experts. Norms do not enlarge rounding errors of outputs that are near 0, and decays are slow as
    in trained models: gradients of those that are drawn are near 0.
    """
    import transformers

    place = make_workplace(tmp_path_factory.mktemp("next"), **KEYS)
    base = write_model(place.root / "base")
    layers = ["linear_attention", "full_attention", "linear_attention"]
    sizes = {"num_hidden_layers": 3, "layer_types": layers, "mlp_only_layers": [1], "rms_norm_eps": 1e-3}
    config = transformers.AutoConfig.for_model("qwen3_next", **TEXT | HYBRID | EXPERTS | sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms of zeros hide what reads them
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.05, 0.5).log_()
    model.save_pretrained(base)
    heads = {name: torch.randn(8, 8).bfloat16() for name in HEADS}
    save_file(weights(base) | heads, base / "model.safetensors", {"format": "pt"})
    return Workplace(place.root, place.config | {"model": str(base)})


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def train(place: Workplace, name: str, **keys: Any) -> Path:
    output = place.root / name
    if not output.exists():
        loaded = run.load(place.write(output_dir=str(output), **keys), mode="train")
        run.train(loaded, notice=lambda line: None)
    return output


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {**LORA, "model_dtype": "bf16"},
        pytest.param({**LORA, "model_dtype": "bf16", "qlora_bnb": True}, marks=pytest.mark.slow),
        pytest.param({**LORA, "model_dtype": "bf16", "qlora_fp8": True}, marks=pytest.mark.slow),
        pytest.param({"recipe": "fp8-hybrid", "model_dtype": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=["fp32", "lora", "nf4", "fp8 base", "fp8-hybrid"],
)
def test_losses_and_every_gradient_are_those_of_transformers(place: Workplace, keys: dict[str, Any]) -> None:
    done = invoke("verify", place.write(**keys), "--rows", "1")
    assert done.returncode == 0 and re.search(r"pass: all \d+ within bounds", done.stdout), done.stdout + done.stderr


def test_outputs_load_and_have_the_layer_that_predicts_further_tokens(place: Workplace) -> None:
    output = train(place, "full", verify_outputs=True)
    before, after = weights(place.root / "base"), weights(output)
    assert before.keys() == after.keys()
    assert {name for name, tensor in after.items() if torch.equal(tensor, before[name])} == {*HEADS}
    assert losses(output)[1] < losses(output)[0]


def test_an_adapter_is_pefts_and_merges_into_what_it_computed(place: Workplace) -> None:
    import peft
    import transformers

    output, merged = train(place, "adapter", **LORA), place.root / "merged"
    model = transformers.AutoModelForCausalLM.from_pretrained(place.root / "base", dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(model, output / "adapter")
    adapted = {name.split(".")[-2] for name, _ in wrapped.named_modules() if name.endswith("lora_A")}
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "gate_proj"} <= adapted
    run.merge(output / "adapter", merged, notice=lambda line: None)
    after = weights(merged)
    assert all(
        torch.equal(after[name], tensor) for name, tensor in weights(place.root / "base").items() if "mtp" in name
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        one, other = (m.eval()(input_ids=ids).logits for m in (wrapped, again))
    assert (one - other).abs().max() < 1e-4 * one.abs().max()


def test_a_quantized_base_trains_as_one_that_the_run_stores(place: Workplace) -> None:
    keys: dict[str, Any] = {**LORA, "qlora_bnb": True, "model_dtype": "bf16"}
    given = ["qlora_bnb=true", "model_dtype=bf16"]
    run.quantize(str(place.root / "base"), place.root / "stored", given, notice=lambda line: None)
    stored = weights(place.root / "stored")
    assert stored["model.layers.0.linear_attn.in_proj_qkvz.weight"].dtype == torch.uint8
    assert stored["model.layers.0.linear_attn.in_proj_ba.weight"].dtype == torch.float32
    assert {*HEADS} <= stored.keys()
    one, other = (
        train(place, "as it trains", **keys),
        train(place, "stored run", **keys, model=str(place.root / "stored")),
    )
    assert losses(one) == losses(other)


def test_a_model_from_scratch_lacks_the_layer_that_predicts_further_tokens(place: Workplace) -> None:
    """Files of transformers lack it too."""
    output = train(place, "from scratch", from_scratch=True, verify_outputs=True)
    assert weights(output).keys() == weights(place.root / "base").keys() - {*HEADS}
