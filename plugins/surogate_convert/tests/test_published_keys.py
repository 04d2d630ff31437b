"""Every key of the published configs of axolotl and LLaMA-Factory, and every argument of the Trainer, TRL and PEFT."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from surogate_convert.convert import Converted, convert
from surogate_convert.rules import tool
from surogate_core.api import ConfigError

HERE = Path(__file__).parent
BASE: dict[str, dict[str, Any]] = {
    "axolotl": {"base_model": "m"},
    "llamafactory": {"model_name_or_path": "m"},
}
KEYS = {name: yaml.safe_load((HERE / f"keys/{name}.yaml").read_text()) for name in BASE}


def config_of(name: str, key: str, value: Any) -> dict[str, Any]:
    """Return a config of a tool with one key, in its place."""
    found: Any = value
    for part in reversed(key.split(".")):
        found = [found] if part == "0" else {part: found}
    if key.startswith("datasets.0.") and key != "datasets.0.type":
        found["datasets"][0].setdefault("type", "completion" if key.endswith(".field") else "chat_template")
    compares = {"rl": "dpo"} if key in ("datasets.0.field_chosen", "datasets.0.field_rejected") else {}
    return {**BASE[name], **found, **compares}


def converted(path: Path, name: str, config: dict[str, Any]) -> Converted | None:
    """Convert a config; None if it is refused."""
    path.write_text(yaml.safe_dump(config))
    try:
        return convert(path, name)
    except ConfigError as error:
        assert "not converted" in str(error) or "not built" in str(error) or "for a file that" in str(error)
        return None


UNKNOWN = {  # misspelt in the published config, a test of its own, or of a type that is named
    "axolotl": {
        "context_parapllel_size",
        "test_value",
        "datasets.0.step_separator",
        "datasets.0.train_on_last_step_only",
    },
    "llamafactory": set[str](),
}


@pytest.mark.parametrize("name", BASE)
def test_each_published_key_is_converted_or_named_with_a_reason(name: str, tmp_path: Path) -> None:
    unknown = set()
    for key, value in KEYS[name].items():
        config = config_of(name, key, value)
        done = converted(tmp_path / "run.yaml", name, config)
        if done is None:
            continue
        assert all(leaf.fate for leaf in done.leaves), key
        assert all(leaf.said != [""] for leaf in done.leaves if leaf.fate != "converted"), key
        unknown |= {key for leaf in done.leaves if any("unknown to surogate" in said for said in leaf.said)}
    assert unknown <= UNKNOWN[name]


def test_all_published_keys_together_are_counted(tmp_path: Path) -> None:
    """Nested tables are counted leaf by leaf."""
    name, alike = "axolotl", {"fsdp_config", "special_tokens", "lr_scheduler_kwargs", "model_config", "deepspeed"}
    config: dict[str, Any] = {"base_model": "m", "datasets": [{"path": "p", "type": "chat_template"}]}
    expected = 3
    for key, value in KEYS[name].items():
        outer, _, inner = key.partition(".")
        if inner and outer in alike and "." not in inner:
            config.setdefault(outer, {})[inner] = value
            expected += 1
    done = converted(tmp_path / "run.yaml", name, config)
    assert done is not None and len(done.leaves) == expected > 20
    assert done.converted + len(done.missing) + len(done.unneeded) == expected


@pytest.mark.parametrize("name", ["trl", "llamafactory", "unsloth"])
def test_every_argument_of_the_trainer_has_a_rule(name: str) -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    assert not [field.name for field in dataclasses.fields(arguments) if field.name not in tool(name).keys]


@pytest.mark.parametrize("name", ["trl", "unsloth"])
def test_every_argument_of_an_adapter_has_a_rule(name: str) -> None:
    peft = pytest.importorskip("peft")
    assert not [field.name for field in dataclasses.fields(peft.LoraConfig) if field.name not in tool(name).keys]
