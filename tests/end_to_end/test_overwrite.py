"""Two runs never share a folder, and outputs of an earlier run are never deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from end_to_end.product import EXAMPLES, contents, records

from surogate import run
from surogate.outputs.folder import set_aside
from surogate.training import trainer
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from end_to_end.product import Workplace


def go(config: Path, *overrides: str) -> list[str]:
    printed: list[str] = []
    run.train(run.load(config, overrides), notice=printed.append)
    return printed


@pytest.mark.parametrize("key", ["output_dir", "checkpoint_dir"])
def test_a_new_run_in_the_folder_of_an_earlier_run_is_refused_with_a_remedy(here: Workplace, key: str) -> None:
    for step in (2, 50):
        (here.out / f"step_{step:08d}").mkdir(parents=True)
    config = here.write(**{"max_steps": 2, "output_dir": "new", key: str(here.out)})
    with pytest.raises(ConfigError) as refused:
        go(config)
    printed = str(refused.value)
    assert f"{key}: {here.out} holds checkpoints of an earlier run (step_00000002 to step_00000050)" in printed
    for remedy in ("resume_from_checkpoint: true", f"another {key}", "overwrite_output_dir: true"):
        assert remedy in printed
    assert not (here.root / "new").exists() and not (here.out / "metrics.jsonl").exists()


def test_overwrite_output_dir_sets_checkpoints_and_records_aside_and_deletes_nothing(here: Workplace) -> None:
    config = here.write(max_steps=3, save_steps=1, save_total_limit=1)
    go(config)
    before = (here.out / "step_00000003/model.safetensors").read_bytes()
    recorded = (here.out / "metrics.jsonl").read_bytes()
    printed = go(config, "overwrite_output_dir=true", "train_seed=7", "max_steps=2")
    assert (here.out / "step_00000003.set_aside/model.safetensors").read_bytes() == before
    assert (here.out / "metrics.jsonl.set_aside").read_bytes() == recorded
    assert sorted(path.name for path in here.out.glob("step_*")) == ["step_00000002", "step_00000003.set_aside"]
    assert [record["step"] for record in records(here.out, "step")] == [1, 2]
    assert (here.out / "outputs.set_aside/model.safetensors").read_bytes() == before
    assert [line.split(":")[0] for line in printed if "set aside, because a new run starts" in line] == [
        *("step_00000003.set_aside", "metrics.jsonl.set_aside", "outputs.set_aside")
    ]
    go(config, "resume_from_checkpoint=true", "train_seed=7", "max_steps=2")
    assert sorted(path.name for path in here.out.glob("step_*")) == ["step_00000002", "step_00000003.set_aside"]


@pytest.mark.slow
def test_resuming_from_another_folder_is_refused_where_a_run_already_is(here: Workplace) -> None:
    go(here.write(max_steps=2, save_steps=1, output_dir="first"))
    config = here.write(max_steps=2, save_steps=1, resume_from_checkpoint="first/step_00000001")
    go(config)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        go(config)
    assert [record["step"] for record in records(here.out, "step")] == [2]


# ------------------------------------------------------------------------------ outputs without checkpoints, and others


def refusal(config: Path, *overrides: str) -> str:
    """Assert that a run is refused without changing a file below the config's folder; return the message."""
    before = contents(config.parent)
    with pytest.raises(ConfigError) as refused:
        go(config, *overrides)
    after = contents(config.parent)
    assert {name: data for name, data in after.items() if "cache" not in name} == {
        name: data for name, data in before.items() if "cache" not in name
    }
    return str(refused.value)


def test_a_finished_run_without_checkpoints_is_not_overwritten(here: Workplace) -> None:
    config = here.write(max_steps=2, save_steps=0)
    go(config)
    assert not list(here.out.glob("step_*"))
    printed = refusal(config, "train_seed=7")
    assert (
        f"output_dir: {here.out} holds config.json, generation_config.json, loss.png and 4 more, of an earlier run"
        in printed
    )
    assert "another output_dir" in printed and "overwrite_output_dir: true" in printed
    asked = refusal(config, "resume_from_checkpoint=true")  # no checkpoint to resume from, and a model to lose
    assert "holds config.json" in asked
    before = contents(here.out)
    go(config, "train_seed=7", "overwrite_output_dir=true")
    assert [record["step"] for record in records(here.out, "step")] == [1, 2]
    assert before["metrics.jsonl"] == (here.out / "metrics.jsonl.set_aside").read_bytes()
    aside = contents(here.out / "outputs.set_aside")
    assert aside == {
        name: before[name] for name in before if name not in ("metrics.jsonl", "plan.json", "run.yaml", "README.md")
    }


OTHERS = {
    "a model": "config.json",
    "its weights": "model-00001-of-00002.safetensors",
    "pickled weights": "pytorch_model.bin",
    "a tokenizer": "tokenizer.json",
    "an adapter": "adapter_config.json",
    "a run's adapter": "adapter/adapter_config.json",
    "a merged model": "merged/model.safetensors",
    "a picture": "loss.png",
    "a config of its user": "run.yaml",
    "a plan of its user": "plan.json",
}


@pytest.mark.parametrize("name", OTHERS.values(), ids=OTHERS)
def test_anything_a_run_would_replace_or_mix_with_is_refused_or_set_aside(here: Workplace, name: str) -> None:
    config = here.write(max_steps=1, warmup_steps=0, eval_steps=0, save_steps=0)
    path = here.out / name
    path.parent.mkdir(parents=True)
    path.write_text("model: mine")
    printed = refusal(config)
    assert (
        f"output_dir: {here.out}" in printed
        and name.split("/")[0] in printed
        and "overwrite_output_dir: true" in printed
    )
    set_aside(run.load(config, ["overwrite_output_dir=true"]), None, lambda line: None)
    aside = here.out / (f"{name}.set_aside" if name in ("run.yaml", "plan.json") else f"outputs.set_aside/{name}")
    assert aside.read_text() == "model: mine"


def test_files_that_a_run_does_not_write_are_left_alone(here: Workplace) -> None:
    (here.out / "notes").mkdir(parents=True)
    (here.out / "notes/config.json").write_text("{}")
    (here.out / "README.md").write_text("mine")
    go(here.write(max_steps=1, warmup_steps=0, save_steps=0))
    assert (here.out / "README.md").read_text() == "mine" and (here.out / "notes/config.json").read_text() == "{}"


def test_a_run_that_failed_before_its_first_step_can_be_started_again(here: Workplace, monkeypatch: Any) -> None:
    def failing(*given: Any) -> None:
        raise RuntimeError("before the first step")

    config = here.write(max_steps=1, warmup_steps=0, save_steps=0)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train", failing)
        with pytest.raises(RuntimeError, match="before the first step"):
            go(config)
    assert sorted(path.name for path in here.out.iterdir()) == ["metrics.jsonl", "plan.json", "run.yaml"]
    go(config)
    assert len(records(here.out, "run")) == 2 and len(records(here.out, "step")) == 1


def test_with_resume_a_run_that_was_stopped_before_its_first_save_starts_again(here: Workplace) -> None:
    config = here.write(max_steps=2, save_steps=0, resume_from_checkpoint=True)
    here.out.mkdir()
    (here.out / "metrics.jsonl").write_text('{"log": "run"}\n{"log": "step", "step": 1}\n')
    (here.out / "loss.png").write_text("drawn by a run that stopped itself, as on a full disk")
    assert "loss.png, metrics.jsonl" in refusal(config, "resume_from_checkpoint=false")
    printed = go(config)
    assert any(line.startswith("metrics.jsonl.set_aside: set aside") for line in printed)
    assert (here.out / "outputs.set_aside/loss.png").read_text().startswith("drawn by")
    assert [record["step"] for record in records(here.out, "step")] == [1, 2]


def test_a_log_file_elsewhere_counts_as_an_earlier_run_and_other_files_are_not_appended_to(here: Workplace) -> None:
    logs = here.root / "logs.jsonl"
    go(here.write(max_steps=1, warmup_steps=0, save_steps=0, log_file=str(logs), output_dir="first"))
    config = here.write(max_steps=1, warmup_steps=0, save_steps=0, log_file=str(logs), output_dir="second")
    assert f"log_file: {logs} holds the metrics of an earlier run" in refusal(config)
    recorded = logs.read_bytes()
    go(config, "overwrite_output_dir=true")
    assert (here.root / "logs.jsonl.set_aside").read_bytes() == recorded
    data = here.root / "documents.jsonl"
    for overwrite in ("true", "false"):
        printed = refusal(config, f"log_file={data}", "output_dir=third", f"overwrite_output_dir={overwrite}")
        assert f"log_file: {data} does not hold metrics of a run" in printed
    printed = refusal(config, f"log_file={data}/metrics.jsonl", "output_dir=third")
    assert f"log_file: {data} cannot be written to. Name another file." in printed


def test_a_run_can_be_resumed_in_a_renamed_folder(here: Workplace) -> None:
    config = here.write(max_steps=2, save_steps=1)
    go(config)
    moved = here.out.rename(here.root / "moved")
    printed = go(config, f"output_dir={moved}", "resume_from_checkpoint=1")
    assert [record["step"] for record in records(moved, "step")] == [1, 2]
    assert [line for line in printed if "set aside" in line] == [
        "step_00000002.set_aside: set aside, because the run resumes from step 1"
    ]


def test_a_resumed_run_does_not_truncate_the_metrics_of_another_run(here: Workplace) -> None:
    go(here.write(max_steps=2, save_steps=1, checkpoint_dir="steps"))
    go(here.write(max_steps=2, save_steps=0, output_dir="other"))
    config = here.write(max_steps=2, save_steps=1, checkpoint_dir="steps", resume_from_checkpoint=1)
    assert "output_dir: other holds" in refusal(config, "output_dir=other")
    go(config)


def test_an_example_can_be_run_repeatedly() -> None:
    """`make quickstart` runs it, and the documentation promises this."""
    for name in ("quickstart", "quickstart-sft"):
        assert yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())["overwrite_output_dir"] is True
