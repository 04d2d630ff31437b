"""Runs that train an adapter, tied embeddings and norms: resumed, continued, merged, loaded in PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace
from safetensors.torch import load_file

from surogate import run
from surogate_core.errors import ConfigError

from .test_resume import stop_after

pytestmark = pytest.mark.slow

TENSORS = "adapter_model.safetensors"
WHOLE = ["embed_tokens", "lm_head", "input_layernorm"]


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with a base model that ties its embeddings, in bf16 with masters in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    workplace = make_workplace(
        tmp_path_factory.mktemp("modules"),
        from_scratch=None,
        model_dtype="bf16",
        master_dtype="fp32",
        max_steps=4,
        save_steps=2,
        learning_rate=1e-2,
        lora_rank=4,
        lora_rank_pattern={"down_proj": 2},
        lora_alpha_pattern={r"layers\.0\..*": 8},
        lora_modules_to_save=WHOLE,
        merge_adapter=True,
    )
    model = workplace.root / "model"
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    drawn.save_pretrained(model)
    return workplace


def sft(workplace: Workplace, name: str, *overrides: str) -> Path:
    config = workplace.write(output_dir=str(workplace.root / name))
    run.train(run.load(config, overrides, "sft"), notice=lambda line: None)
    return workplace.root / name


@pytest.fixture(scope="module")
def straight(based: Workplace) -> Iterator[Path]:
    yield sft(based, "straight")


def test_an_interrupted_run_resumes_bit_identically(
    based: Workplace, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        stopped = sft(based, "stopped")
    assert not (stopped / "adapter").exists()
    with pytest.raises(ConfigError, match="lora_modules_to_save"):
        sft(based, "stopped", "resume_from_checkpoint=true", "lora_modules_to_save=[norm]")
    sft(based, "stopped", "resume_from_checkpoint=true")
    files = sorted(path.relative_to(straight) for path in (straight / "step_00000004").rglob("*.safetensors"))
    assert len(files) == 2
    for file in (*files, Path("adapter") / TENSORS):
        left, right = load_file(straight / file), load_file(stopped / file)
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_peft_and_the_merged_model_give_the_same_logits(based: Workplace, straight: Path) -> None:
    """Merging rounds each projection to bf16 once more: 2^-9 each, over two blocks with a few consecutive products."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(straight / "merged", dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(based.root / "model", dtype=torch.float32)(ids).logits
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(straight / "adapter", dtype=torch.float32)(ids).logits
    assert (theirs - merged).norm() <= 1e-2 * merged.norm()
    assert (merged - base).norm() > 10 * (theirs - merged).norm()
    stored, whole = load_file(straight / "adapter" / TENSORS), load_file(straight / "merged/model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(stored[f"base_model.model.{name}"], whole[name])
    assert torch.equal(stored["base_model.model.lm_head.weight"], whole["model.embed_tokens.weight"])
    assert (
        "lm_head.weight" not in whole
        and json.loads((straight / "merged/config.json").read_text())["tie_word_embeddings"]
    )


def test_a_saved_adapter_can_be_trained_further(based: Workplace, straight: Path) -> None:
    """With learning rate 0 the adapter does not change."""
    still = ("learning_rate=0", "warmup_steps=0", "max_steps=1", f"adapter_path={straight / 'adapter'}")
    more = sft(based, "more", *still)
    before, after = (load_file(folder / "adapter" / TENSORS) for folder in (straight, more))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert losses(more)[0] < losses(straight)[0] - 0.05
    for change, printed in (
        ("lora_modules_to_save=[input_layernorm]", "holds model.embed_tokens.weight, which this run does not"),
        ("lora_rank_pattern={}", "rank_pattern is"),
    ):
        with pytest.raises(ConfigError, match=printed):
            sft(based, "refused", *still, change)
