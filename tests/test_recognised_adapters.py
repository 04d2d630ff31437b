"""A saved adapter is read by the plugin that recognises its content; PEFT's format for adapters without files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate import run
from surogate.checkpoints.adapter import check_adapter, kind_of_adapter
from surogate_core.api import NoOptions
from surogate_core.api.peft import PEFT_CONFIG, PEFT_TENSORS, PeftFormat, read_peft_config
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry


def folder_of(path: Path, **config: Any) -> Path:
    (path / PEFT_CONFIG).write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("use_dora", "kind"), [(True, "dora"), (False, "lora"), (None, "lora")])
def test_the_plugin_is_found_by_what_the_file_says(tmp_path: Path, use_dora: bool | None, kind: str) -> None:
    folder = folder_of(tmp_path, peft_type="LORA", use_dora=use_dora)
    assert kind_of_adapter(load_registry(), folder) == kind


def test_an_adapter_that_no_plugin_reads_is_refused_with_what_it_says_and_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, peft_type="LORA", use_dora=True, use_rslora=False)
    monkeypatch.setenv("SUROGATE_PLUGINS", "-surogate-adapter-dora")
    with pytest.raises(ConfigError) as caught:
        run.merge(folder, tmp_path / "merged")
    assert str(caught.value) == (
        f'{folder / PEFT_CONFIG} says peft_type: "LORA", use_dora: true: no installed adapter reads it; lora does not. '
        "pip install surogate-adapter-dora"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"peft_type": "IA3"}',
            r'says peft_type: "IA3": no installed adapter reads it; dora, lora do not. Install the',
        ),
        ("[1]", r"adapter_config.json: must contain a JSON object, contains list"),
        ("{", r"adapter_config.json: is not valid JSON"),
        ("[" * 100000, r"adapter_config.json: is not valid JSON"),
    ],
)
def test_a_file_that_nobody_can_read_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / PEFT_CONFIG).write_text(content)
    with pytest.raises(ConfigError, match=message):
        kind_of_adapter(load_registry(), tmp_path)


# -------------------------------------------------------------------------------------------------------- the format


class Options(NoOptions):
    width: float = 4


def scaled_rows(weight: Tensor, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    return weight * parts[".ia3_l"] * config["width"]


FORMAT = PeftFormat(
    peft_type="IA3",
    parts={".ia3_l": ".ia3_l"},
    merged=scaled_rows,
    keys={"width": "width"},
    marks={"kind": "rows"},
    values={"bias": ("none", "zero")},
    inert=("remark",),
)
MODULE = "model.layers.0.mlp.up_proj"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    FORMAT.save({f"{MODULE}.ia3_l": torch.arange(1.0, 4)[:, None]}, tmp_path, "base", Options())
    return tmp_path


def test_what_is_saved_is_loaded_and_merged(saved: Path) -> None:
    assert read_peft_config(saved) == {
        "peft_type": "IA3",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "revision": None,
        "inference_mode": True,
        "target_modules": [MODULE],
        "width": 4,
        "kind": "rows",
        "bias": "none",
    }
    assert FORMAT.matches(saved)
    assert [*load_file(saved / PEFT_TENSORS)] == [f"base_model.model.{MODULE}.ia3_l"]
    loaded = FORMAT.load(saved, Options())
    assert loaded.keys() == {f"{MODULE}.ia3_l"}
    merge = FORMAT.merge(saved)
    assert merge.base_model == "base" and merge.changes.keys() == {f"{MODULE}.weight"}
    merged = merge.changes[f"{MODULE}.weight"](torch.ones(3, 2, dtype=torch.bfloat16))
    assert merged.tolist() == [[4, 4], [8, 8], [12, 12]] and merged.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 5}, "width is 5, but width is 4. Set width to the first"),
        ({"bias": "all"}, "bias is 'all', which is not built"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', which is not built"),
        ({"new_feature": {"on": 1}}, "new_feature is .*, which is not built"),
        ({"kind": "columns"}, "kind is 'columns', expected 'rows'"),
        ({"target_modules": ["down_proj"]}, "target_modules of adapter_config.json does not select"),
        ({"target_modules": None}, "target_modules is None. Name the adapter's modules"),
        ({"target_modules": "("}, "is no regular expression"),
        ({"target_modules": r".*\.down_proj"}, "does not select"),
    ],
)
def test_a_config_that_means_something_else_is_refused(saved: Path, change: dict[str, Any], message: str) -> None:
    folder_of(saved, **read_peft_config(saved) | change)
    with pytest.raises(ConfigError, match=message):
        FORMAT.load(saved, Options())


@pytest.mark.parametrize(
    "change",
    [
        {"remark": [1]},
        {"bias": "zero"},
        {"new_feature": None},
        {"task_type": None},
        {"target_modules": ["up_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.up_proj"},
    ],
)
def test_a_config_that_means_the_same_is_accepted(saved: Path, change: dict[str, Any]) -> None:
    folder_of(saved, **read_peft_config(saved) | change)
    assert FORMAT.load(saved, Options()).keys() == {f"{MODULE}.ia3_l"}


def test_tensors_that_do_not_belong_to_it_are_refused(saved: Path) -> None:
    path = saved / PEFT_TENSORS
    for name, message in ((f"base_model.model.{MODULE}.other", "is no tensor of this kind"), ("x.ia3_l", "begin with")):
        save_file({name: torch.ones(3, 1)}, path)
        with pytest.raises(ConfigError, match=message):
            FORMAT.merge(saved)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="truncated or corrupt"):
        FORMAT.merge(saved)
    path.unlink()
    with pytest.raises(ConfigError, match="Pickled adapters are never read"):
        FORMAT.merge(saved)


def test_a_base_of_another_shape_is_refused(saved: Path) -> None:
    change = FORMAT.merge(saved).changes[f"{MODULE}.weight"]
    with pytest.raises(ConfigError, match=r"up_proj does not fit adapter_config.json and a weight \[5, 2\]"):
        change(torch.ones(5, 2))
    with pytest.raises(ConfigError, match=r"is of a weight \[3, 2\]; the base's is \[1, 2\]. Name its own base"):
        change(torch.ones(1, 2))


def test_a_module_without_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    two = PeftFormat(peft_type="X", parts={".a": ".a.weight", ".b": ".b"}, merged=scaled_rows)
    two.save({"up.a": torch.ones(1)}, tmp_path, "base", NoOptions())
    with pytest.raises(ConfigError, match=r"lacks up\.b\. Save the adapter again"):
        two.load(tmp_path, NoOptions())


def test_an_adapter_to_train_further_is_looked_at_before_the_data(tmp_path: Path) -> None:
    registry, said = load_registry(), list[str]()

    def check(model: str) -> list[str]:
        said.clear()
        config, adapter = SimpleNamespace(adapter_path=str(tmp_path), model=model), (registry.adapter("lora"), None)
        run = SimpleNamespace(config=config, registry=registry, adapter=adapter, model_dir=tmp_path / "model")
        check_adapter(cast(Any, run), said.append)
        return said

    with pytest.raises(ConfigError, match=r"adapter_path: .*: holds no adapter_config.json"):
        check("llama")
    file = tmp_path / "adapter_config.json"
    file.write_text('{"peft_type": "LORA", "base_model_name_or_path": "/models/qwen"}')
    assert check("some/qwen") == []
    assert check("llama")[0].endswith("was trained on /models/qwen, and model is llama: its weights may not fit")
    file.write_text('{"peft_type": "LORA", "use_dora": true}')
    with pytest.raises(ConfigError, match="is an adapter of dora, and this run trains lora"):
        check("llama")
