"""Runs of a family with a bias that is never trained and a matrix that is never quantized, as users start them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import corrected_family
import pytest
import torch
from corrected_family import GATES, OWN, in_transformers, write_corrected
from end_to_end.product import Workplace, invoke, losses
from safetensors.torch import load_file
from torch import Tensor

from surogate import run
from surogate_verify.verification import Extent, verify

BIASES = tuple(f"model.layers.{i}.mlp.bias" for i in range(2))


@pytest.fixture
def based(here: Workplace) -> Workplace:
    """A workplace whose base has weights in bf16, but for the biases, whose values bf16 cannot hold."""
    folder = here.root / "model"
    config = json.loads((folder / "config.json").read_text())
    write_corrected(folder, {**config, **OWN, "head_dim": 32, "tie_word_embeddings": False})
    in_transformers()
    own = {"plugins": [corrected_family.__file__], "from_scratch": None, "model_dtype": "bf16", "eval_steps": 0}
    return replace(here, config={**here.config, **own, "max_steps": 2, "warmup_steps": 0, "weight_decay": 0.1})


def train(workplace: Workplace, name: str, **keys: object) -> Path:
    out = workplace.root / name
    run.train(run.load(workplace.write(output_dir=str(out), **keys)), notice=lambda line: None)
    return out


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def changed(folder: Path, base: dict[str, Tensor]) -> set[str]:
    own = weights(folder)
    assert own.keys() == base.keys()
    return {name for name, x in own.items() if x.dtype != base[name].dtype or not torch.equal(x, base[name])}


@pytest.mark.parametrize("keys", [{}, {"recipe": "fp8-hybrid"}, {"recipe": "nvfp4"}], ids=str)
def test_outputs_checkpoints_and_exports_hold_the_bias_as_it_was_read(based: Workplace, keys: dict[str, str]) -> None:
    base = weights(based.root / "model")
    assert all(base[name].dtype == torch.float32 for name in BIASES)
    out = train(based, "straight", save_steps=1, **keys)
    run.export(out / "step_00000002", based.root / "exported")
    for folder in (out, out / "step_00000002", based.root / "exported"):
        assert {*base} - changed(folder, base) == {*BIASES}, folder
    resumed = train(based, "resumed", resume_from_checkpoint=str(out / "step_00000001"), **keys)
    assert losses(resumed)[-1] == losses(out)[-1]
    assert changed(resumed, weights(out)) == set()


def test_ranks_that_divide_everything_write_it_too(based: Workplace) -> None:
    base = weights(based.root / "model")
    out = train(based, "divided", ranks_per_gpu=2, zero_level=3, save_steps=1)
    for folder in (out, out / "step_00000002"):
        assert {*base} - changed(folder, base) == {*BIASES}, folder
    resumed = train(based, "resumed", ranks_per_gpu=2, zero_level=3, resume_from_checkpoint=str(out / "step_00000001"))
    assert losses(resumed)[-1] == losses(out)[-1] and changed(resumed, weights(out)) == set()


def test_an_adapter_leaves_it_and_a_merged_model_has_it(based: Workplace) -> None:
    base = weights(based.root / "model")
    out = train(based, "lora", lora=True, lora_rank=4, merge_adapter=True, verify_outputs=False)
    assert not any("bias" in name or "router" in name for name in weights(out / "adapter"))
    assert any("gate_proj" in name for name in weights(out / "adapter"))
    merged = changed(out / "merged", base)
    assert merged and all("self_attn" in name for name in merged)
    run.merge(out / "adapter", based.root / "again")
    assert changed(based.root / "again", weights(out / "merged")) == set()


def test_a_model_from_scratch_starts_with_its_init(based: Workplace) -> None:
    out = train(based, "scratch", from_scratch=True, max_steps=1, save_steps=1)
    drawn = weights(out)
    assert all(float(drawn[name].std()) > 0.05 and drawn[name].dtype == torch.float32 for name in BIASES)
    again = train(based, "again", from_scratch=True, max_steps=2)
    assert all(torch.equal(weights(again)[name], drawn[name]) for name in BIASES)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("keys", [{"model_dtype": "fp32"}, {"recipe": "fp8-hybrid"}, {"recipe": "nvfp4"}], ids=str)
def test_verify_compares_with_transformers_without_the_bias(keys: dict[str, str], lora: bool, based: Workplace) -> None:
    """PEFT puts its own module around o_proj, past the hook that gates its input here."""
    more = {"lora": True, "lora_rank": 4, "lora_target_modules": ["q_proj", "gate_proj"]} if lora else {}
    found = verify(based.write(**keys, **more), (), Extent(rows=4, length=64), notice=lambda line: None)
    assert found.passed and not found.verdict.not_compared
    compared = {row.name for row in found.verdict.rows}
    own = "model.layers.0.self_attn.gate_proj.lora_A" if lora else "model.layers.0.mlp.router.weight"
    assert not compared.intersection(BIASES) and own in compared, compared


def test_the_plan_says_what_is_not_quantized(based: Workplace) -> None:
    text = invoke("plan", based.write(recipe="fp8-hybrid", model_dtype="bf16")).stdout
    assert "gate_proj in bf16, which fp8-hybrid does not quantize" in text and "products of block" not in text, text


def test_quantize_lists_the_gate_as_not_converted(based: Workplace) -> None:
    plugins = f"plugins=[{corrected_family.__file__}]"
    run.quantize(str(based.root / "model"), based.root / "stored", ["qlora_bnb=true", plugins])
    config = json.loads((based.root / "stored/config.json").read_text())
    kept = config["quantization_config"]["llm_int8_skip_modules"]
    assert "model.layers.0.self_attn.gate_proj" in kept and "model.layers.0.self_attn.q_proj" not in kept
    stored, base = weights(based.root / "stored"), weights(based.root / "model")
    for name in (*BIASES, "model.layers.1.self_attn.gate_proj.weight"):
        assert torch.equal(stored[name], base[name]) and stored[name].dtype == base[name].dtype
    assert base["model.layers.1.self_attn.gate_proj.weight"].shape[0] == GATES
