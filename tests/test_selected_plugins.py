"""Adapters, launchers and offload strategies of a plugin are selected by a key of the config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_plugins import Install
from typer.testing import CliRunner
from whole_plugin import the_error, whole_plugin, write_config

from surogate import run
from surogate.cli.app import app
from surogate_core.errors import ConfigError, PluginError
from surogate_core.plugins.discovery import load_registry


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from whole_plugin(tmp_path, monkeypatch)


def test_an_adapter_is_selected_by_its_name_trained_saved_and_merged(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", "")
    whole = run.train(run.load(write_config(tmp_path)))
    adapted = {"adapter": "Acme", "acme_train": "embedding", "from_scratch": False, "merge_adapter": True}
    path = write_config(tmp_path, model=str(whole.output_dir), output_dir=str(tmp_path / "adapted"), **adapted)
    loaded = run.load(path)
    assert (loaded.config.adapter, loaded.config.lora) == ("acme", False)
    prepared = run.plan(loaded)
    assert [value.name for value in prepared.assembly.trainable] == ["embedding"]

    result = run.train(loaded)
    assert result.adapter_dir is not None and result.merged_dir is not None
    assert sorted(f.name for f in result.adapter_dir.iterdir() if f.name.startswith("acme")) == [
        "acme.json", "acme.safetensors",
    ]  # fmt: skip
    merged = CliRunner().invoke(app, ["merge", str(result.adapter_dir), str(tmp_path / "again")])
    assert merged.exit_code == 0, merged.output
    same = [(folder / "model.safetensors").read_bytes() for folder in (result.merged_dir, tmp_path / "again")]
    assert same[0] == same[1] != (whole.output_dir / "model.safetensors").read_bytes()


def test_a_folder_that_is_no_adapter_names_the_files_of_all_installed_ones(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", "")
    printed = the_error(CliRunner().invoke(app, ["merge", str(tmp_path), str(tmp_path / "merged")]))
    assert "is not a saved adapter: it holds none of acme.json (acme), adapter_config.json (dora, lora)" in printed
    for name in ("acme.json", "adapter_config.json"):
        (tmp_path / name).write_text('{"peft_type": "LORA"}')
    printed = the_error(CliRunner().invoke(app, ["merge", str(tmp_path), str(tmp_path / "merged")]))
    assert "Choose one: --adapter acme" in printed


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora": True, "adapter": "acme"}, r"adapter: is 'acme', but lora: true means adapter: lora; remove one"),
        ({"lora": True, "adapter": "none"}, r"adapter: is 'none', but lora: true means adapter: lora; remove one"),
        ({"lora": False, "adapter": "lora"}, r"lora: is false, but adapter is lora; remove one"),
        ({"adapter": "acme", "from_scratch": True}, r"adapter: an adapter needs a base model .* set adapter: none"),
        ({"adapter": "zzz"}, r"adapter: zzz — no installed plugin provides it"),
        ({"launcher": "zzz"}, r"launcher: zzz — no installed plugin provides it. Installed: acme, env, local"),
    ],
)
def test_contradictory_and_unknown_names_are_refused(
    tmp_path: Path, install: Install, keys: dict[str, Any], message: str
) -> None:
    install("acme", "0.1.0", "zz", "")
    with pytest.raises((ConfigError, PluginError), match=message):
        run.load(write_config(tmp_path, **{"from_scratch": False, **keys}))


def test_an_error_in_recognises_names_the_plugin(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", 'change("ADAPTER", matches=boom)')
    (tmp_path / "acme.json").write_text("{}")
    printed = the_error(CliRunner().invoke(app, ["merge", str(tmp_path), str(tmp_path / "merged")]))
    assert "adapter acme of acme 0.1.0 failed in matches: KeyError: 'boom'" in printed


@pytest.mark.parametrize(
    ("mode", "keys", "adapter"),
    [
        ("train", {}, None),
        ("sft", {}, "lora"),
        ("sft", {"adapter": "none"}, None),
        ("sft", {"lora": False}, None),
        ("sft", {"adapter": "acme"}, "acme"),
        ("train", {"lora": True}, "lora"),
        ("train", {"adapter": "lora"}, "lora"),
        ("train", {"adapter": "lora", "lora": True}, "lora"),
        ("train", {"adapter": "acme", "lora": False}, "acme"),
    ],
)
def test_lora_is_an_alias_of_an_adapter_s_name(
    tmp_path: Path, install: Install, mode: Any, keys: dict[str, Any], adapter: str | None
) -> None:
    from surogate.config.load import load_config, resolved

    install("acme", "0.1.0", "zz", "")
    loaded = run.load(write_config(tmp_path, **{"from_scratch": False, **keys}), mode=mode)
    assert (loaded.config.adapter, loaded.config.lora) == (adapter, adapter == "lora")
    assert set(loaded.adapters) == ({adapter} if adapter else set())
    again = load_config(resolved(loaded), registry=load_registry(), mode=mode, source="again")
    assert again == loaded


def test_a_launcher_is_selected_by_its_name_with_its_options(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", "")
    record = tmp_path / "launched"
    result = run.train(run.load(write_config(tmp_path, launcher="acme", acme_record=str(record))))
    assert (result.steps, record.read_text()) == (1, "1 device\n")


def test_a_launcher_that_starts_its_processes_needs_no_join(tmp_path: Path, install: Install) -> None:
    start = "lambda task, notice, options: task.work(World(started_by='acme'), notice)"
    install("acme", "0.1.0", "zz", f'change("LAUNCHER", join=None, start={start})')
    assert run.train(run.load(write_config(tmp_path, launcher="acme"))).steps == 1


def test_a_run_that_resumes_with_another_launcher_is_still_bit_identical(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", "0.1.0", "zz", "")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    steps = {"max_steps": 2, "save_steps": 1, "lr_scheduler_type": "constant"}
    run.train(run.load(write_config(tmp_path, launcher="env", join_seconds=5, **steps)))
    lines: list[str] = []
    again = write_config(tmp_path, resume_from_checkpoint=1, overwrite_output_dir=True, **steps)
    loaded = run.load(again)
    result = run.train(loaded, lines.append)
    assert (loaded.config.launcher, result.steps) == ("local", 2)
    assert not [line for line in lines if "bit-identical" in line], lines


def test_an_offload_strategy_is_selected_by_its_keys(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", "")

    def labels(**keys: Any) -> list[str]:
        programs = run.plan(run.load(write_config(tmp_path, **keys))).assembly.programs
        return [v.label for op in programs["micro_first"].ops for v in op.outs if op.kind == "acme_twice"]

    assert labels() == labels(acme_offload="") == ["twice", "twice"]
    assert labels(acme_offload="moved") == ["twice", "twice", "moved"]
