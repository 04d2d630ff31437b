"""Pushing to a fake hub: permissions are checked before the first step, files are uploaded after the last."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file

from surogate import run
from surogate.checkpoints.progress import Progress
from surogate.cli.options import RunArguments
from surogate.cli.train import train_command
from surogate.outputs import push as hub_push
from surogate.outputs.check import OutputCheck
from surogate.outputs.model_card import MARK, model_card
from surogate.outputs.push import push, reserve
from surogate.runs.run import Run
from surogate_core.errors import ConfigError, RunStopped

if TYPE_CHECKING:
    from end_to_end.product import Workplace


class FakeHub:
    """Records calls of HfApi and checks their arguments against its signatures. The call named `refuses` fails."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[str] = []
        self.uploaded: set[str] = set()
        self._refuses = refuses

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            inspect.signature(getattr(HfApi, name)).bind(self, *args, **kwargs)
            self.calls.append(name)
            if name == self._refuses:
                raise OSError("403 Forbidden\nsecond line")
            if name == "upload_folder":
                kept = huggingface_hub.utils.filter_repo_objects(
                    [p.relative_to(kwargs["folder_path"]).as_posix() for p in Path(kwargs["folder_path"]).rglob("*")],
                    allow_patterns=kwargs["allow_patterns"],
                )
                self.uploaded = set(kept)
            return {"whoami": {"name": "ada"}, "create_repo": SimpleNamespace(repo_id=args[0] if args else "")}.get(
                name
            )

        return call


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return use(FakeHub(), monkeypatch)


def use(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr(hub_push, "hub_api", lambda: hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return hub


def go(config: Path) -> tuple[run.TrainResult, list[str]]:
    printed: list[str] = []
    return run.train(run.load(config), notice=printed.append), printed


@pytest.mark.slow
def test_a_model_is_pushed_with_its_card_and_without_private_files(here: Workplace, hub: FakeHub) -> None:
    keys = {"push_to_hub": True, "hub_private": True, "run_name": "my run", "verify_outputs": True}
    result, _ = go(here.write(max_steps=2, save_steps=1, **keys))
    assert result.pushed is not None and result.pushed.url == "https://huggingface.co/ada/my-run"
    assert hub.calls == ["whoami", "create_repo", "auth_check", "upload_folder"]
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert hub.uploaded == files | {"README.md"}
    card = ModelCard.load(here.out / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["surogate"],
    }  # fmt: skip
    for row in ("| optimizer steps | 2 |", "| loss | next_token |", "| learning_rate | 0.003 |"):
        assert row in card.text
    assert "vllm serve ada/my-run" in card.text and str(here.root) not in card.text


@pytest.mark.slow
def test_an_output_that_does_not_load_ends_the_run_and_is_neither_pushed_nor_deleted(
    here: Workplace, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = OutputCheck.load

    def break_and_load(check: OutputCheck, opened: Run) -> None:
        tensors = load_file(here.out / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, here.out / "model.safetensors", metadata={"format": "pt"})
        load(check, opened)

    monkeypatch.setattr(OutputCheck, "load", break_and_load)
    with pytest.raises(RunStopped, match=f"{here.out} is written, but does not load in transformers: missing keys"):
        go(here.write(max_steps=2, verify_outputs=True, push_to_hub=True))
    assert (here.out / "model.safetensors").is_file() and "upload_folder" not in hub.calls


def test_a_failed_upload_exits_with_3_and_prints_a_command_and_the_run_is_complete(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(FakeHub(refuses="upload_folder"), monkeypatch)
    assert train_command(RunArguments(here.write(max_steps=2, push_to_hub=True, hub_model_id="org/m"), [])) == 3
    out, err = capsys.readouterr()
    assert "done, 2 steps" in out and (here.out / "model.safetensors").is_file()
    assert "403 Forbidden" in err and f"hf upload org/m {here.out} ." in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("refuses", "says"), [("whoami", "hf auth login"), ("create_repo", "hub_model_id"), ("auth_check", "hub_model_id")]
)
def test_missing_write_permission_is_an_error_before_the_first_step(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, refuses: str, says: str
) -> None:
    hub = use(FakeHub(refuses), monkeypatch)
    with pytest.raises(ConfigError, match=f"push_to_hub: .*403 Forbidden.*{says}"):
        go(here.write(push_to_hub=True))
    assert hub.calls[-1] == refuses and not here.out.exists()


def test_offline_mode_is_an_error_before_the_first_step(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        reserve(run.load(here.write(push_to_hub=True)).config)


def test_the_whole_folder_of_an_adapter_is_pushed(tmp_path: Path, hub: FakeHub) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md", ".hidden"):
        (tmp_path / name).write_text("x")
    assert push(tmp_path, "ada/a", lambda line: None).url
    assert hub.uploaded == {"adapter_config.json", "adapter_model.safetensors", "README.md"}


def test_the_card_of_an_adapter_names_the_base_and_the_data_on_the_hub(here: Workplace) -> None:
    loaded = run.load(here.write(from_scratch=None, lora_rank=32), mode="sft")
    opened = run.open_run(loaded)
    plan = run.plan(opened, device="h200")
    (local,) = loaded.config.datasets
    data = (local, local.model_copy(update={"path": "OpenLLM-Ro/ro_gsm8k"}))
    config = loaded.config.model_copy(update={"model": "Qwen/Qwen3-0.6B", "datasets": data})
    there = replace(opened, loaded=replace(loaded, config=config))
    progress = Progress(step=9, tokens=1000, loss=2.5, evaluations=[(5, 2.0, 10), (9, 2.25, 10)])
    card = ModelCard(model_card(there, plan, "ada/m", progress, {"torch": "2.13"}))
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen3-0.6B", "base_model_relation": "adapter", "datasets": ["OpenLLM-Ro/ro_gsm8k"],
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["surogate", "lora"],
    }  # fmt: skip
    for line in ("| validation loss | 2.2500 |", "| best validation loss | 2.0000 |", "| lora_rank | 32 |"):
        assert line in card.text
    assert "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 32" in card.text
    assert str(here.root) not in model_card(opened, plan, "ada/m", progress, {})
    adapter, options = opened.adapter
    nameless = replace(opened, adapter=(replace(adapter, commands=lambda folder, base, options: []), options))
    assert "## Use" in card.text and "## Use" not in model_card(nameless, plan, "ada/m", progress, {})


def test_a_card_written_by_the_user_is_kept(here: Workplace) -> None:
    here.out.mkdir()
    (here.out / "README.md").write_text("mine")
    go(here.write(max_steps=2))
    assert (here.out / "README.md").read_text() == "mine"
    (here.out / "README.md").write_text(f"old {MARK}")
    go(here.write(max_steps=2, overwrite_output_dir=True))
    front = (here.out / "README.md").read_text().split("---")[1]
    assert yaml.safe_load(front)["library_name"] == "transformers"
