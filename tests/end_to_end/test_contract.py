"""The outputs of a finished run: files, records, and checkpoints that give the same loss in transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from end_to_end.product import VOCAB_SIZE, documents, losses, records, write_jsonl, write_model

from surogate import run
from surogate.config.load import resolved
from surogate.outputs.folder import open_output
from surogate.runs.versions import library_versions
from surogate.training.run_files import RunFiles
from surogate_core.api import RunInfo

if TYPE_CHECKING:
    from end_to_end.conftest import Finished
    from end_to_end.product import Workplace

CHECKPOINT_FILES = {
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
}
STEP_KEYS = [
    *("log", "step", "epoch", "loss", "norm", "lr", "tokens", "valid_tokens"),
    *("tokens_per_second", "duration_ms", "time"),
]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_run_writes_these_files_and_no_others(finished: Finished) -> None:
    steps = {"step_00000006", "step_00000008", "step_00000010"}
    assert names(finished.out) == CHECKPOINT_FILES | steps | {
        "metrics.jsonl",
        "plan.json",
        "loss.png",
        "run.yaml",
        "README.md",
    }
    for step in steps:
        assert names(finished.out / step) == CHECKPOINT_FILES | {"manifest.json", "training_state"}
    assert (finished.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_metrics_begin_with_the_run_record_and_have_the_documented_keys_in_order(finished: Finished) -> None:
    first, *rest = records(finished.out)
    assert first["log"] == "run"
    assert [record["step"] for record in rest if record["log"] == "step"] == list(range(1, 11))
    assert [record["step"] for record in rest if record["log"] == "eval"] == [5, 10]
    for record in rest:
        if record["log"] == "step":
            assert list(record) == STEP_KEYS
        else:
            assert list(record)[:4] == ["log", "step", "loss", "valid_tokens"]


def test_metrics_have_the_documented_meaning(finished: Finished) -> None:
    steps = records(finished.out, "step")
    assert abs(steps[0]["loss"] - math.log(VOCAB_SIZE)) < 0.1, "nats a label"
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert [step["lr"] for step in steps[:2]] == pytest.approx([1.5e-3, 3e-3]) and steps[-1]["lr"] == 0
    for step in steps:
        assert 0 < step["valid_tokens"] < step["tokens"] <= 4 * 2 * 64, "the last token of a document has no label"
        assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["duration_ms"] * 1000)
    assert all(a["time"] < b["time"] for a, b in pairwise(steps))


def test_the_saved_config_loads_to_the_same_config(finished: Finished) -> None:
    saved = run.load(finished.out / "run.yaml")
    given = run.load(finished.workplace.root / "run.yaml")
    assert saved == given and resolved(saved) == resolved(given)
    head = (finished.out / "run.yaml").read_text()
    assert "# torch " in head and "# surogate-core " in head and "train_seed: 1234" in head


def test_the_resolved_config_describes_the_same_run_in_every_folder(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.root / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(here.root))
    relative = {"model": "model", "output_dir": "out", "checkpoint_dir": "saves", "log_file": "~/log.jsonl"}
    data = {
        "datasets": [{"path": "*.jsonl"}, {"path": "owner/name"}],
        "validation_datasets": [{"path": "~/documents.jsonl"}],
    }
    config = here.write(**relative, **data, resume_from_checkpoint="last-good")
    open_output(run.load(config), library_versions(), lambda line: None)
    saved = yaml.safe_load((here.root / "out/run.yaml").read_text())
    assert {key: saved[key] for key in relative} == {
        "model": f"{here.root}/model",
        "output_dir": f"{here.root}/out",
        "checkpoint_dir": f"{here.root}/saves",
        "log_file": f"{here.root}/log.jsonl",
    }
    assert [entry["path"] for entry in saved["datasets"]] == [f"{here.root}/*.jsonl", "owner/name"]
    assert [entry["path"] for entry in saved["validation_datasets"]] == [f"{here.root}/documents.jsonl"]
    assert saved["resume_from_checkpoint"] == "last-good"
    monkeypatch.chdir(here.root / "elsewhere")
    again = run.load(here.root / "out/run.yaml")
    assert run.open_run(again).model_dir == here.root / "model"


def test_the_time_of_an_evaluation_is_planned_for_the_rows_that_it_reads(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[RunInfo] = []
    run_info = RunFiles._run_info

    def watched(*given: Any) -> RunInfo:
        known.append(run_info(*given))
        return known[-1]

    monkeypatch.setattr(RunFiles, "_run_info", watched)
    for name, changes in {"some": {"eval_samples": 8}, "none": {"validation_split_ratio": 0}}.items():
        config = here.write(max_steps=1, warmup_steps=0, save_steps=0, output_dir=str(here.root / name), **changes)
        run.train(run.load(config), lambda line: None)
    plan = run.plan(run.load(config), "cpu")
    assert plan.eval_seconds(8) == 2 * plan.eval_seconds(4) == 2 * plan.eval_seconds(1), "batches of 4 rows"
    some, none = (info.eval_time for info in known)
    assert none == 0 < some == pytest.approx(plan.eval_seconds(8) / plan.report.step.seconds)


def test_the_terminal_output_fits_80_columns_and_ends_with_the_summary(finished: Finished) -> None:
    assert finished.stderr == ""
    lines = finished.stdout.splitlines()
    long = [line for line in lines if len(line) > 80 and str(finished.out) not in line]
    assert not long
    assert "\x1b" not in finished.stdout, "no escape codes where there is no terminal"
    for word in ("training loss", "validation loss", "unigram model", "bits per byte", "from_pretrained"):
        assert word in finished.stdout


@pytest.mark.parametrize("which", ["", "step_00000010"])
def test_transformers_loads_a_checkpoint_and_computes_the_loss_of_the_evaluation(
    finished: Finished, which: str
) -> None:
    check_by_transformers(finished.out / which, records(finished.out, "eval")[-1])


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 32},
    "Llama": {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 32}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_transformers_computes_its_loss(family: str, here: Workplace) -> None:
    write_model(
        here.root / "model", architectures=[f"{family}ForCausalLM"], model_type=family.lower(), **FAMILIES[family]
    )
    held_out = write_jsonl(here.root / "held_out.jsonl", documents(30, skip=300))
    config = here.write(validation_datasets=[{"path": str(held_out), "type": "text"}], validation_split_ratio=None)
    run.train(run.load(config, []), notice=lambda line: None)
    assert losses(here.out)[-1] < losses(here.out)[0]
    check_by_transformers(here.out, records(here.out, "eval")[-1])


def check_by_transformers(path: Path, evaluation: dict[str, Any]) -> None:
    """Compare the loss of an evaluation with that of transformers, which reads the documents one by one, unpacked."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("What, ho!")["input_ids"]) == "What, ho!"
    total, labels = 0.0, 0
    with torch.no_grad():
        for tokens in _validation_pieces(tokenizer):
            logits = model(torch.tensor([tokens])).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum"))
            labels += len(tokens) - 1
    assert labels == evaluation["valid_tokens"]
    assert total / labels == pytest.approx(evaluation["loss"], rel=1e-5)


def _validation_pieces(tokenizer: Any) -> Iterator[list[int]]:
    """Return the tokens of each document with its end, cut at the 64 positions of a row, without code of Surogate."""
    for text in documents(30, skip=300):
        tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        yield from (tokens[at : at + 64] for at in range(0, len(tokens), 64))


@pytest.mark.parametrize(("max_steps", "num_epochs", "expected"), [(-1, 2, 8), (0, 1, 4), (3, 2, 3), (6, 1, 6)])
def test_max_steps_overrides_epochs_and_an_epoch_reads_every_row_once(
    here: Workplace, max_steps: int, num_epochs: int, expected: int
) -> None:
    """26 rows in steps of 8: the fourth step has two rows and six rows of padding."""
    write_jsonl(here.root / "documents.jsonl", documents(26, longest=120))
    config = here.write(max_steps=max_steps, num_epochs=num_epochs, validation_split_ratio=0, sample_packing=False)
    done = run.train(run.load(config), notice=lambda line: None)
    steps = records(here.out, "step")
    assert len(steps) == done.steps == done.total_steps == expected
    assert [step["epoch"] for step in steps] == [(i + 1) / 4 for i in range(expected)]
    assert records(here.out, "run")[0]["steps_per_epoch"] == 4
    epochs = [sum(step["tokens"] for step in steps[at : at + 4]) for at in range(0, expected - 3, 4)]
    assert len(set(epochs)) <= 1, "every epoch has the same tokens, in another order"
    if expected == 8:
        assert [s["tokens"] for s in steps[:4]] != [s["tokens"] for s in steps[4:]]
        assert steps[3]["tokens"] < steps[2]["tokens"] / 2
    assert not records(here.out, "eval")


def test_checkpoints_of_an_earlier_run_do_not_count_towards_save_total_limit(here: Workplace) -> None:
    config = here.write(save_total_limit=2)
    run.train(run.load(config, ["max_steps=6", "save_steps=3"]), notice=lambda line: None)
    overrides = ["max_steps=4", "save_steps=1", "overwrite_output_dir=true"]
    run.train(run.load(config, overrides), notice=lambda line: None)
    saved = {path.name for path in here.out.glob("step_*")}
    assert saved == {"step_00000003", "step_00000004", "step_00000003.set_aside", "step_00000006.set_aside"}
