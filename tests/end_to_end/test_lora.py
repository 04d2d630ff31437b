"""`surogate sft` trains an adapter, which loads in PEFT, can be resumed and continued, and merges into its base."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end.product import Workplace, assert_refused, invoke, losses, make_workplace
from safetensors.torch import load_file
from torch import Tensor

from surogate import run
from surogate.hub.config_json import read_config
from surogate_core.errors import ConfigError

from .test_resume import stop_after

if TYPE_CHECKING:
    from subprocess import CompletedProcess

pytestmark = pytest.mark.slow

ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "base.json"}
ADAPTER_FILES |= {"tokenizer.json", "tokenizer_config.json"}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose model has weights, drawn by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    workplace = make_workplace(
        tmp_path_factory.mktemp("lora"), from_scratch=None, max_steps=4, save_steps=2, lora_rank=4, learning_rate=1e-2
    )
    torch.manual_seed(0)
    model = workplace.root / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32).save_pretrained(
        model, max_shard_size="300KB"
    )
    return workplace


@pytest.fixture(scope="module")
def trained(based: Workplace) -> Iterator[tuple[Workplace, CompletedProcess[str]]]:
    done = based.surogate("sft", based.write(merge_adapter=True, verify_outputs=True))
    assert done.returncode == 0, done.stdout + done.stderr
    yield based, done


def test_an_adapter_run_writes_these_files_and_prints_their_folders(
    trained: tuple[Workplace, CompletedProcess[str]],
) -> None:
    workplace, done = trained
    out = workplace.out
    steps = {"step_00000002", "step_00000004"}
    assert names(out) == steps | {"adapter", "merged", "metrics.jsonl", "plan.json", "loss.png", "run.yaml"}
    assert names(out / "adapter") == ADAPTER_FILES | {"README.md"}
    for step in steps:
        assert names(out / step) == ADAPTER_FILES | {"manifest.json", "training_state"}
    last = [(out / folder / "adapter_model.safetensors").read_bytes() for folder in ("adapter", "step_00000004")]
    assert last[0] == last[1]
    assert "8.2K trained" in done.stdout and "the adapter in adapter" in done.stdout.replace("\n" + " " * 19, " ")
    assert "from_scratch" not in done.stdout and "peft.AutoPeftModelForCausalLM" in done.stdout
    assert losses(out)[-1] < losses(out)[0]


@pytest.mark.parametrize(("recipe", "dropout"), [("bf16", 0.0), ("bf16", 0.25), ("fp8-hybrid", 0.0)])
def test_an_interrupted_run_resumes_bit_identically(
    recipe: str, dropout: float, based: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sft(name: str, *overrides: str) -> Path:
        config = based.write(output_dir=str(tmp_path / name), lora_dropout=dropout, recipe=recipe, model_dtype="bf16")
        run.train(run.load(config, overrides, "sft"), notice=lambda line: None)
        return tmp_path / name / "step_00000004"

    straight = sft("straight")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        stopped = sft("stopped")
    assert not stopped.exists()
    with pytest.raises(ConfigError, match="lora_rank"):
        sft("stopped", "resume_from_checkpoint=true", "lora_rank=8")
    assert sft("stopped", "resume_from_checkpoint=true") == stopped
    files = sorted(path.relative_to(straight) for path in straight.rglob("*.safetensors"))
    assert [file.name for file in files] == ["adapter_model.safetensors", "state-00001-of-00001.safetensors"]
    for file in files:
        left, right = load_file(straight / file), load_file(stopped / file)
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_two_ranks_drop_the_same_elements_as_one_rank_in_as_many_micro_steps(based: Workplace, tmp_path: Path) -> None:
    """Each rank drops different elements. In fp32 only the order of the sums of gradients differs."""

    def sft(name: str, **changes: Any) -> list[float]:
        settings = {"lora_dropout": 0.25, "per_device_train_batch_size": 2, **changes}
        config = based.write(output_dir=str(tmp_path / name), **settings)
        run.train(run.load(config, (), "sft"), notice=lambda line: None)
        return losses(tmp_path / name)

    alone = sft("alone", gradient_accumulation_steps=2)
    assert sft("without", gradient_accumulation_steps=2, lora_dropout=0.0) != pytest.approx(alone, rel=1e-4)
    assert sft("together", gradient_accumulation_steps=1, ranks_per_gpu=2) == pytest.approx(alone, rel=1e-5)


def test_peft_and_the_merged_model_give_the_same_logits(trained: tuple[Workplace, CompletedProcess[str]]) -> None:
    """Merged weights are rounded once to fp32, and the adapter's branch sums in another order."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    workplace, _ = trained
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(workplace.out / "merged")(ids).logits
        base = AutoModelForCausalLM.from_pretrained(workplace.root / "model")(ids).logits
        for folder in ("adapter", "step_00000004"):
            unmerged = peft.AutoPeftModelForCausalLM.from_pretrained(workplace.out / folder)(ids).logits
            assert (unmerged - merged).norm() <= 1e-5 * merged.norm()
    assert (merged - base).norm() > 1e-2 * base.norm()


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def test_merging_keeps_the_bases_files_and_frozen_tensors(trained: tuple[Workplace, CompletedProcess[str]]) -> None:
    workplace, _ = trained
    base, merged = workplace.root / "model", workplace.out / "merged"
    shards = {path.name for path in base.glob("model*")}
    assert len(shards) > 2 and shards == {path.name for path in merged.glob("model*")}
    before, after = weights(base), weights(merged)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    config = json.loads((merged / "config.json").read_text())
    assert config == json.loads((base / "config.json").read_text())


def test_surogate_merge_writes_the_same_model(trained: tuple[Workplace, CompletedProcess[str]], tmp_path: Path) -> None:
    workplace, _ = trained
    done = invoke("merge", workplace.out / "adapter", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "model") in done.stdout
    ours, theirs = weights(tmp_path / "model"), weights(workplace.out / "merged")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    refused = invoke("merge", workplace.out / "adapter", workplace.root / "model", "--overwrite")
    assert_refused(refused, "model: is an input", "Name another output folder")
    assert_refused(invoke("merge", workplace.out, tmp_path / "x"), "adapter_config.json", "Name the folder of one: ")
    other = invoke("merge", workplace.out / "adapter", tmp_path / "y", "--base", tmp_path / "none")
    assert_refused(other, "--base: ", "none")
    with pytest.raises(ConfigError, match=r"adapter holds an adapter: name it in adapter_path"):
        read_config(workplace.out / "adapter")
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_a_saved_adapter_can_be_trained_further(
    trained: tuple[Workplace, CompletedProcess[str]], tmp_path: Path
) -> None:
    """With learning rate 0 the adapter and its loss do not change."""
    workplace, _ = trained
    start: dict[str, Any] = {"adapter_path": str(workplace.out / "adapter"), "output_dir": str(tmp_path / "more")}
    start |= {"warmup_steps": 0, "max_steps": 1, "learning_rate": 0.0, "overwrite_output_dir": True}
    done = invoke("sft", workplace.write(**start))
    assert done.returncode == 0, done.stderr
    files = [folder / "adapter_model.safetensors" for folder in (workplace.out / "adapter", tmp_path / "more/adapter")]
    before, after = map(load_file, files)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert losses(tmp_path / "more")[0] < losses(workplace.out)[0] - 0.05
    for change, printed in (
        ({"lora_rank": 8}, "lora_rank"),
        ({"lora_target_modules": ["q_proj"]}, "of the same model, targets"),
        ({"adapter_path": str(workplace.out)}, "adapter_config.json"),
    ):
        assert_refused(invoke("sft", workplace.write(**(start | change))), printed)


def test_wrong_targets_are_refused_by_the_plan_too(based: Workplace) -> None:
    printed = invoke("plan", based.write(lora=True, lora_target_modules=["query"]))
    assert_refused(printed, "lora_target_modules", "q_proj", "all-linear")
    assert_refused(invoke("sft", based.write(from_scratch=True)), "from_scratch")


def test_the_plan_shows_what_is_trained_and_holds_nothing_for_frozen_weights(based: Workplace) -> None:
    """Each projection has r (in + out) elements in fp32, with a gradient, two moments and no master each."""
    model = based.root / "model/config.json"
    c = json.loads(model.read_text())
    d, ff, q, kv = c["hidden_size"], c["intermediate_size"], 4 * 16, 2 * 16
    sizes = [(d, q), (d, kv), (d, kv), (q, d), (d, ff), (d, ff), (ff, d)]
    trained = 2 * 4 * sum(rows + columns for rows, columns in sizes)
    done = invoke("plan", based.write(lora=True))
    assert done.returncode == 0, done.stderr
    assert "8.2K trained" in done.stdout and "optimizer adamw_8bit, adapter lora" in done.stdout
    planned = json.loads(invoke("plan", based.write(lora=True), "--json").stdout)["device_bytes"]
    slack = 2 * 2 * 7 * 256  # every buffer begins at a multiple of 256 bytes
    assert 4 * trained <= planned["gradients"] <= 4 * trained + slack
    assert 8 * trained <= planned["optimizer"] <= 8 * trained + 2 * slack + 1024
