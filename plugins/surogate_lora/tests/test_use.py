"""A saved adapter is loaded by PEFT; what does not fit its base is refused."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from end_to_end.product import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate_core.api.peft import check_in_peft as check
from surogate_lora.files import TENSORS_FILE
from surogate_lora.options import LoraOptions
from surogate_lora.use import commands

peft = pytest.importorskip("peft", reason="what is tested loads by it: pip install peft")

UP = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """An adapter that PEFT has saved, and the folder of its base, which has no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = write_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", base


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / TENSORS_FILE)
    edit(tensors)
    save_file(tensors, folder / TENSORS_FILE, metadata={"format": "pt"})


def test_a_whole_adapter_loads(saved: tuple[Path, Path]) -> None:
    check(*saved)


def test_a_tensor_that_lacks_is_named(saved: tuple[Path, Path]) -> None:
    change(saved[0], lambda tensors: tensors.pop(UP))
    with pytest.raises(ValueError, match=r"lacks .*layers\.0\.mlp\.up_proj\.lora_A"):
        check(*saved)


def test_a_tensor_too_many_is_named(saved: tuple[Path, Path]) -> None:
    change(saved[0], lambda tensors: tensors.update({"base_model.model.extra.lora_A.weight": torch.ones(1, 1)}))
    with pytest.raises(ValueError, match=r"holds, unexpectedly, .*extra"):
        check(*saved)


def test_another_shape_and_a_truncated_file_are_refused(saved: tuple[Path, Path]) -> None:
    change(saved[0], lambda tensors: tensors.update({UP: tensors[UP][:2].clone()}))
    with pytest.raises(RuntimeError, match="size mismatch"):
        check(*saved)
    os.truncate(saved[0] / TENSORS_FILE, 100)
    with pytest.raises(Exception, match=r"(?i)header|safetensor"):
        check(*saved)


def test_the_commands_name_adapter_base_and_a_rank_that_vllm_must_be_told() -> None:
    printed = dict(commands(Path("out/adapter"), "Qwen/Qwen3-0.6B", LoraOptions(lora_rank=64)))
    assert printed["PEFT"] == "peft.AutoPeftModelForCausalLM.from_pretrained('out/adapter')"
    assert printed["vLLM"] == (
        "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 64 --lora-modules out=out/adapter"
    )
    assert "peft=out/adapter" in printed["lm-eval"]
    assert "--max-lora-rank" not in dict(commands(Path("out/adapter"), "b", LoraOptions()))["vLLM"]


def test_a_path_with_a_space_is_one_word_of_a_command() -> None:
    lines = dict(commands(Path("my runs/adapter"), "my base", LoraOptions()))
    assert "pretrained=my base,peft=my runs/adapter" in shlex.split(lines["lm-eval"])
    assert {"my base", "my runs=my runs/adapter"} <= set(shlex.split(lines["vLLM"]))


def test_vllm_has_no_line_for_what_it_refuses_or_would_scale_wrongly() -> None:
    for keys in ({"lora_modules_to_save": ["norm"]}, {"lora_rank_pattern": {"q": 2}}, {"lora_alpha_pattern": {"q": 2}}):
        printed = dict(commands(Path("out/adapter"), "base", LoraOptions(**keys)))
        assert printed.keys() == {"PEFT", "lm-eval"}
