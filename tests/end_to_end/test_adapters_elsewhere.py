"""Adapters after their run: merging into a folder, the printed load commands, the remedy of a refused resume."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end.product import assert_refused, contents, invoke
from safetensors.torch import load_file, save_file

from surogate import run
from surogate.checkpoints.export_source import find_source
from surogate.outputs.load_commands import load_commands
from surogate_core.errors import ConfigError, RunStopped
from surogate_core.machine.devices import cpu
from surogate_core.plugins.discovery import load_registry

if TYPE_CHECKING:
    from end_to_end.product import Workplace

BASE_FILES = ("model.safetensors", "config.json")


@pytest.fixture
def based(here: Workplace) -> Workplace:
    """A workplace with a base model, and a config that trains an adapter for two steps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = here.root / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    here.write(from_scratch=None, lora=True, lora_rank=2, max_steps=2, save_steps=1, eval_steps=0)
    return here


def train(workplace: Workplace, *overrides: str) -> run.TrainResult:
    return run.train(run.load(workplace.root / "run.yaml", overrides), notice=lambda line: None)


@pytest.fixture
def adapter(based: Workplace) -> Path:
    """The folder of a complete adapter."""
    folder = based.root / "adapter"
    folder.mkdir()
    prepared = run.plan(run.load(based.root / "run.yaml"), cpu())
    ((definition, options),) = prepared.inputs.adapters
    trained = {v.name: torch.ones(v.shape) for v in prepared.assembly.trainable}
    definition.save(trained, folder, str(based.root / "model"), options)
    return folder


# ---------------------------------------------------------------------------------------------------------------- merge


def test_merge_replaces_nothing_unless_told_to(based: Workplace, adapter: Path) -> None:
    output = based.root / "merged"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    for name in BASE_FILES:
        shutil.copy(based.root / "model" / name, output / name)
    (output / "pytorch_model.bin").write_text("older")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(ConfigError, match=r"merged: is not empty: it holds config\.json, .* --overwrite, which sets"):
        run.merge(adapter, output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    run.merge(adapter, output, overwrite=True)
    aside = output / "outputs.set_aside"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == {
        name: data for name, data in before.items() if name != "notes.txt"
    }
    assert (output / "notes.txt").read_text() == "mine" and not (output / "pytorch_model.bin").exists()
    assert (output / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_a_base_whose_weights_changed_is_refused_and_taken_with_a_warning_if_it_is_named(based: Workplace) -> None:
    """By each command that puts the adapter of a run, or of its checkpoint, on a base."""
    train(based)
    out, base, told = based.out, based.root / "model", "has other weights than the base that"
    same = invoke("merge", out / "adapter", based.root / "same")
    assert same.returncode == 0 and told not in same.stdout + same.stderr
    weights = load_file(base / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, base / "model.safetensors", {"format": "pt"})
    for folder in (out / "adapter", out / "step_00000002"):
        new = based.root / f"of-{folder.name}"
        for command, *rest in (
            ("merge", folder, f"{new}-merged"),
            ("export", folder, f"{new}-exported"),
            ("generate", folder, "--raw", "--prompt", "a", "--max-new-tokens", "1"),
        ):
            assert_refused(invoke(command, *rest), f"{told} {folder}", f"--base {base}")
            named = invoke(command, *rest, "--base", base)
            assert named.returncode == 0 and f"{told} {folder}" in named.stdout + named.stderr, command
    lines: list[str] = []
    further = [f"adapter_path={out / 'adapter'}", f"output_dir={based.root / 'further'}"]
    run.train(run.load(based.root / "run.yaml", further), notice=lines.append)
    assert any("was trained on other weights than those of model" in line for line in lines)


def test_a_merged_model_of_an_earlier_adapter_is_not_taken_for_that_of_a_later_one(based: Workplace) -> None:
    """A run ends with a merged model, and is trained further without one, and with one of another form."""
    constant = ["lr_scheduler_type=constant", "warmup_steps=0", "verify_outputs=false"]
    further = [*constant, "resume_from_checkpoint=true"]
    merged, aside = based.out / "merged", based.out / "outputs.set_aside"
    train(based, *constant, "merge_adapter=true")
    first = contents(merged)
    train(based, *further, "max_steps=3", "merge_adapter=true")  # of the same form: replaced
    second = contents(merged)
    assert first.keys() == second.keys() and first != second and not aside.exists()
    train(based, *further, "max_steps=4")
    assert not merged.exists() and contents(aside / "merged") == second
    assert find_source(str(based.out), load_registry()).folder == based.out / "adapter"
    train(based, *further, "max_steps=4", "merge_adapter=true", "merge_format=gguf")
    assert {path.suffix for path in merged.iterdir()} >= {".gguf"}
    train(based, *further, "max_steps=5", "merge_adapter=true")
    assert contents(merged).keys() == first.keys()


def test_merge_accepts_new_and_empty_folders_and_leftovers_of_a_killed_merge(based: Workplace, adapter: Path) -> None:
    for number, left in enumerate((None, "", ".saving-x")):
        output = based.root / f"merged{number}"
        if left is not None:
            (output / left).mkdir(parents=True)
        run.merge(adapter, output)
        assert load_file(output / "model.safetensors") and not list(output.glob(".saving-*"))
    file = based.root / "file"
    file.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="file: is a file"):
            run.merge(adapter, file, overwrite=overwrite)


def test_merge_never_sets_aside_what_it_reads(based: Workplace, adapter: Path) -> None:
    for output in (based.root / "model", adapter, based.root):  # base, adapter, parent of both
        before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
        with pytest.raises(ConfigError, match=r"is an input, but would be set aside|of a run or an adapter"):
            run.merge(adapter, output, overwrite=True)
        assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_a_refused_merge_leaves_the_model_in_its_folder(based: Workplace, adapter: Path) -> None:
    """The base lacks a matrix: that is found while the merged files are written."""
    output = based.root / "merged"
    run.merge(adapter, output)
    weights = based.root / "model/model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if "1.mlp.up_proj" not in name}, weights)
    before = contents(output)
    with pytest.raises(ConfigError, match=r"model: has no .*1\.mlp\.up_proj\.weight, which the adapter changes"):
        run.merge(adapter, output, overwrite=True)
    assert contents(output) == before
    with pytest.raises(ConfigError, match=r"model: has no .*1\.mlp\.up_proj\.weight, which the adapter changes"):
        run.merge(adapter, based.root / "more/deep/new")
    assert not (based.root / "more").exists()


def test_a_full_disk_ends_a_merge_with_one_line(based: Workplace, adapter: Path, disk_limit: None) -> None:
    """Only weights are larger than the limit."""
    done = invoke("merge", adapter, based.root / "merged")
    assert (done.returncode, done.stderr) == (3, f"error: saving {based.root / 'merged'} failed: File too large.\n")
    assert not (based.root / "merged").exists()


def test_a_file_of_the_base_that_cannot_be_read_is_named(
    based: Workplace, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = shutil.copyfile

    def copyfile(source: Path, target: Path) -> None:
        if source.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))
        read(source, target)

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    file = based.root / "model/tokenizer.json"
    with pytest.raises(RunStopped, match=rf"saving .*merged failed: {file}: Permission denied\.$"):
        run.merge(adapter, based.root / "merged")


def test_an_output_that_cannot_be_a_folder_is_refused_in_one_line(based: Workplace, adapter: Path) -> None:
    for output, message in {
        based.root / "run.yaml/sub": "cannot be written to: Not a directory. Name another folder.",
        Path("/dev/null/sub"): "cannot be written to: Not a directory. Name another folder.",
        Path("/proc/x/y"): "cannot be written to: No such file or directory. Name another folder.",
        based.root / ("x" * 300): "cannot be written to: File name too long. Name another folder.",
        based.root / "run.yaml": "is a file. Name a folder for the model.",
    }.items():
        for overwrite in ((), ("--overwrite",)):
            for command in (("merge", adapter), ("quantize", based.root / "model", "--set", "qlora_bnb=true")):
                assert_refused(invoke(*command, output, *overwrite), f"{output}: {message}")


def test_a_base_of_another_revision_must_be_given_with_base(based: Workplace, adapter: Path) -> None:
    path = adapter / "adapter_config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps(given | {"revision": "v2", "base_model_name_or_path": "owner/model"}))
    with pytest.raises(ConfigError, match=r"revision is .v2., .*hf download owner/model --revision v2"):
        run.merge(adapter, based.root / "merged")
    run.merge(adapter, based.root / "merged", base=str(based.root / "model"))


def test_a_quantized_base_is_refused_and_the_original_is_given_with_base(based: Workplace, adapter: Path) -> None:
    run.quantize(str(based.root / "model"), based.root / "nf4", ["qlora_bnb=true"])
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(based.root / "nf4")}))
    with pytest.raises(ConfigError, match=r"nf4/config\.json: .*Give the original checkpoint .*: --base MODEL\.$"):
        run.merge(adapter, based.root / "merged")
    run.merge(adapter, based.root / "merged", base=str(based.root / "model"))


# ------------------------------------------------------------------------------------------------------------- commands


PLAIN: dict[str, Any] = {}
WHOLE = {"lora_modules_to_save": ["lm_head", "embed_tokens"]}
RANKS = {"lora_rank_pattern": {"q_proj": 1}}


@pytest.mark.parametrize(
    ("options", "merge"), [(PLAIN, True), (PLAIN, False), (WHOLE, True), (WHOLE, False), (RANKS, True)]
)
def test_the_vllm_command_loads_only_what_vllm_can_serve(
    based: Workplace, options: dict[str, Any], merge: bool
) -> None:
    """vLLM refuses adapters with fully trained modules, and scales adapters with patterns wrongly."""
    keys = {"lora": True, "from_scratch": None, "merge_adapter": merge}
    found = load_commands(run.open_run(run.load(based.write(**keys, **options))))
    assert found[0] == ("surogate", f"surogate generate {based.out} --raw --prompt 'Once upon a time'")
    lines = [line for program, line in found if program == "vLLM"]
    adapter, merged = based.out / "adapter", based.out / "merged"
    if options is PLAIN:
        assert lines == [f"vllm serve {based.root / 'model'} --enable-lora --lora-modules out={adapter}"]
    elif merge:
        assert lines == [f"vllm serve {merged}"]
    else:
        assert lines == [f"surogate merge {adapter} {merged} && vllm serve {merged}"]
    assert any(str(merged) in line for program, line in found if program == "transformers") == merge


# --------------------------------------------------------------------------------------------------------------- resume


def test_the_remedy_named_by_a_refused_resume_works(based: Workplace) -> None:
    train(based)
    with pytest.raises(ConfigError) as refused:
        train(based, "resume_from_checkpoint=true", "max_steps=3")
    checkpoint = based.out / "step_00000002"
    assert f"adapter_path: {checkpoint}." in str(refused.value) and "model:" not in str(refused.value).split("with")[-1]
    train(based, f"adapter_path={checkpoint}", "output_dir=more", "max_steps=3")
    assert (based.root / "more/adapter/adapter_model.safetensors").is_file()
