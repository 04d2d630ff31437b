"""Invalid input: exit code 2, one message that names the cause, no traceback, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.product import assert_refused, documents, invoke, records, write_jsonl, write_model
from typer.testing import CliRunner

from surogate.cli.app import app

if TYPE_CHECKING:
    from end_to_end.product import Workplace


def refusal(here: Workplace, *args: str) -> str:
    """Run `surogate train` in this process, assert that it refuses, and return its message on stderr."""
    done = CliRunner().invoke(app, ["train", str(here.root / "run.yaml"), *args])
    assert done.exit_code == 2, (done.output, done.exception)
    assert isinstance(done.exception, SystemExit)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["pt", "train", "sft"])
def test_pt_train_and_sft_train_on_text(here: Workplace, verb: str) -> None:
    config = here.write(max_steps=3)
    lora = ["--set", "lora=false"] if verb == "sft" else []
    done = invoke(verb, "--config", config, *lora, "--set", "max_steps=2", "--set", "run_name=mine")
    assert done.returncode == 0, done.stderr
    assert len(records(here.out, "step")) == 2
    assert records(here.out, "run")[0]["run_name"] == "mine"
    assert "mine: done, 2 steps" in done.stdout


def test_sft_trains_an_adapter_which_needs_a_base(here: Workplace) -> None:
    assert_refused(invoke("sft", here.write()), "lora: ", "from_scratch: true", "lora: false")
    assert not here.out.exists()


def test_a_broken_config_and_a_broken_dataset_are_refused_in_a_separate_process(workplace: Workplace) -> None:
    assert_refused(workplace.surogate("train", workplace.write(learning_rat=1)), "learning_rat", "learning_rate")
    missing = workplace.write(datasets=[{"path": "absent.txt", "type": "text"}])
    assert_refused(workplace.surogate("train", missing), "datasets.0", "absent.txt")
    assert not workplace.out.exists()


def _corrupt_line(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[6] = lines[6][: len(lines[6]) // 2]
    path.write_text("\n".join(lines))


def _no_text(path: Path) -> None:
    path.write_text(json.dumps({"words": "to be"}) + "\n")


def _empty(path: Path) -> None:
    path.write_text("")


def _blank(path: Path) -> None:
    write_jsonl(path, [""] * 5)


def _number(path: Path) -> None:
    path.write_text(json.dumps({"text": 7}) + "\n")


def _not_utf8(path: Path) -> None:
    path.write_bytes(b'{"text": "ab\xff\xfe"}\n')


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "printed"),
    [
        (_corrupt_line, "documents.jsonl:7"),
        (_no_text, "words"),
        (_empty, "documents.jsonl"),
        (_blank, "empty"),
        (_number, "text"),
        (_not_utf8, "documents.jsonl"),
        (_folder, "documents.jsonl"),
    ],
)
def test_data_that_cannot_be_read_is_refused(spoil: Callable[[Path], None], printed: str, here: Workplace) -> None:
    here.write()
    spoil(here.root / "documents.jsonl")
    assert printed in refusal(here)
    assert not here.out.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_len": 128}, ["sequence_len", "128", "64"]),
        ({"datasets": None}, ["datasets", "required"]),
        ({"datasets": []}, ["datasets"]),
        ({"model": None}, ["model", "required"]),
        ({"model": "nowhere"}, ["model", "nowhere"]),
        ({"from_scratch": False}, ["model.safetensors", "from_scratch: true"]),
        ({"learning_rate": 1e300}, ["learning_rate", "1e+38"]),
        ({"learning_rate": float("nan")}, ["learning_rate"]),
        ({"warmup_steps": 11}, ["warmup_steps: 11", "10"]),
        ({"validation_split_ratio": 1.0}, ["validation_split_ratio"]),
        ({"validation_split_ratio": 0.9999}, ["datasets"]),
        ({"lmhead_chunks": 7}, ["lmhead_chunks", "7", "256"]),
        ({"recipe": "fp8"}, ["recipe", "fp8"]),
        ({"recipe": "nvfp4"}, ["model_dtype: fp32", "nvfp4 needs bf16", "Remove the key"]),
        ({"optimizer": "adamw_8bit", "optimizer_state_dtype": "bf16"}, ["optimizer_state_dtype", "Remove the key"]),
        ({"gpus": 64}, ["gpus: 64", "visible here", "Use gpus: "]),
        ({"output_dir": ""}, ["output_dir"]),
        ({"matmul_dtype": "bf16", "gradient_dtype": "fp32"}, ["gradient_dtype"]),
    ],
)
def test_invalid_and_incompatible_settings_are_refused(
    changes: dict[str, Any], words: list[str], here: Workplace
) -> None:
    here.write(**changes)
    printed = refusal(here)
    assert all(word in printed for word in words), printed
    assert not here.out.exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(here: Workplace) -> None:
    write_model(here.root / "model", vocab_size=512)
    here.write()
    printed = refusal(here)
    assert "512" in printed and "tokenizer" in printed and "model.resize_token_embeddings(len(tokenizer))" in printed
    assert not here.out.exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_model_directory_with_missing_files_is_refused(missing: str, here: Workplace) -> None:
    (here.root / "model" / missing).unlink()
    here.write()
    assert missing in refusal(here)
    assert not here.out.exists()


def test_an_unknown_architecture_is_refused_with_a_list_of_installed_ones(here: Workplace) -> None:
    write_model(here.root / "model", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    here.write()
    printed = refusal(here)
    assert "GPT2LMHeadModel" in printed and "qwen3" in printed.lower()


def test_an_output_that_cannot_be_written_is_refused(here: Workplace) -> None:
    (here.root / "file").write_text("mine")
    for output in ("/proc/nowhere/out", here.root / "file", here.root / "file/out"):
        here.write(output_dir=str(output))
        assert "output_dir" in refusal(here)
    assert (here.root / "file").read_text() == "mine"


@pytest.mark.parametrize("spelling", ["model", "model/", "./model/../model", "link"])
def test_an_output_that_is_the_models_own_directory_is_refused(spelling: str, here: Workplace) -> None:
    (here.root / "link").symlink_to(here.root / "model")
    before = {path.name: path.read_bytes() for path in (here.root / "model").iterdir()}
    here.write(output_dir=spelling)
    assert "output_dir" in refusal(here)
    assert before == {path.name: path.read_bytes() for path in (here.root / "model").iterdir()}


def test_a_tilde_in_a_path_is_the_home_directory(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here.root / "home"))
    here.write(max_steps=2, output_dir="~/out", log_file="~/log.jsonl")
    done = CliRunner().invoke(app, ["train", str(here.root / "run.yaml")])
    assert done.exit_code == 0, done.output
    assert (here.root / "home/out/model.safetensors").exists() and (here.root / "home/log.jsonl").exists()
    assert not (here.root / "~").exists()


def test_checkpoints_in_the_models_own_directory_leave_its_files_unchanged(here: Workplace) -> None:
    before = {path.name: path.read_bytes() for path in (here.root / "model").iterdir()}
    here.write(max_steps=2, checkpoint_dir=str(here.root / "model"), save_steps=2)
    done = CliRunner().invoke(app, ["train", str(here.root / "run.yaml")])
    assert done.exit_code == 0, done.output
    after = {path.name: path.read_bytes() for path in (here.root / "model").iterdir() if path.is_file()}
    assert before == after and (here.root / "model/step_00000002/model.safetensors").exists()


def test_documents_of_one_token_only_are_refused(here: Workplace) -> None:
    write_jsonl(here.root / "documents.jsonl", ["a", "b"])
    tokenizer = here.root / "model/tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"eos_token": None}))
    here.write(validation_split_ratio=0.0)
    assert "datasets" in refusal(here)
    assert documents(1)
