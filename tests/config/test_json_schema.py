"""The JSON Schema of configs takes what the config takes, and refuses what it refuses key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from typer.testing import CliRunner

from surogate import run
from surogate.cli.app import app
from surogate.config.errors import keys_of
from surogate.config.json_schema import config_schema
from surogate.config.load import load_config, resolved
from surogate.config.schema import TrainConfig
from surogate.config.yaml import read_yaml
from surogate_core.errors import SurogateError
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import Registry

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("benchmarks/**/*.yaml")])

ACCEPTED = """
{max_steps: "1e3", learning_rate: "2e-4", sample_packing: no, per_device_train_batch_size: 8.0}
{recipe: FP8_Hybrid, model_dtype: bf16, optimizer: null, adapter: none}
{device_memory_limit: 24GiB, host_memory_limit: 68719476736, recompute: false, use_zero_copy: auto}
{rope_scaling: yarn, max_model_len: 4096}
{report_to: wandb, lora_target_modules: all-linear, lora: true, lora_rank: $RANK_OF_LORA}
{report_to: [wandb, tensorboard], rope_scaling: {rope_type: yarn, factor: 4}, resume_from_checkpoint: last-good}
{offload_weights: 18, kernels: {rmsnorm: acme-kernels, default: compiled}, fp4_four_over_six: all}
{recompute_attention: true, memcpy_all_gather: true, model_type: qwen3, min_lr_ratio: 0, early_stop: false}
{distributed: {num_nodes: 4}, distillation: {top_k: 32}}
{datasets: a.txt}
{datasets: [a.txt, {path: b}], validation_datasets: c.txt}
{datasets: [{path: a.txt, type: text, sample_by: line}, {path: b, samples: 10, weight: 0.5}]}
{datasets: [{path: c, type: conversation, message_property_mappings: {role: from, content: value}}]}
"""

REFUSED = """
{learning_rat: 1e-4}
{learning_rate: -1}
{max_steps: [1]}
{lora_rank: 0}
{sample_packing: 3}
{recipe: fp9}
{report_to: [tensorbord]}
{lr_scheduler_type: cosin}
{model_dtype: fp16}
{validation_split_ratio: 1.5}
{early_stop: true}
{max_length: 100}
{distributed: {num_nodes: 0}}
{distributed: {nodes: 2}}
{datasets: {path: a.txt}}
{datasets: [{type: text}]}
{datasets: [{path: a.txt, type: txt}]}
{datasets: [{path: a.txt, type: text, messages_field: x}]}
{datasets: [{path: a.txt, type: text, sample_by: page}]}
"""


def _configs(text: str) -> list[Any]:
    return [pytest.param(yaml.safe_load(line) | {"model": "m"}, id=line) for line in text.strip().splitlines()]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.fixture(scope="module")
def schema(registry: Registry) -> Draft7Validator:
    found = config_schema(registry)
    Draft7Validator.check_schema(found)
    return Draft7Validator(found)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_config_of_this_repository_is_valid(path: Path, schema: Draft7Validator) -> None:
    assert not [error.message for error in schema.iter_errors(read_yaml(path))]


def test_the_resolved_config_of_a_run_is_valid(schema: Draft7Validator) -> None:
    loaded = run.load(ROOT / "examples/quickstart-sft.yaml", ["report_to=[tensorboard]", "device_memory_limit=3GiB"])
    assert not [error.message for error in schema.iter_errors(resolved(loaded))]


@pytest.mark.parametrize("config", _configs(ACCEPTED))
def test_what_the_config_takes_is_valid(
    config: dict[str, Any], schema: Draft7Validator, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_OF_LORA", "8")
    load_config(config, registry=registry, source="test")
    assert not [error.message for error in schema.iter_errors(config)]


@pytest.mark.parametrize("config", _configs(REFUSED))
def test_what_the_config_refuses_is_not_valid(
    config: dict[str, Any], schema: Draft7Validator, registry: Registry
) -> None:
    with pytest.raises(SurogateError):
        load_config(config, registry=registry, source="test")
    errors = list(schema.iter_errors(config))
    key = next(iter(config))
    assert len(errors) == 1
    assert key in errors[0].message or errors[0].path[0] == key


def test_every_key_has_its_description_and_default(schema: Draft7Validator, registry: Registry) -> None:
    properties = schema.schema["properties"]
    served = {*TrainConfig.model_fields}.union(*(keys_of(model) for model in registry.options_models().values()))
    assert served <= properties.keys()
    assert not [key for key in served if not properties[key].get("description")]
    assert properties["num_epochs"]["default"] == 3
    proposed = {key for key, schema in properties.items() if not schema.get("doNotSuggest")}
    assert proposed == served


def test_the_command_knows_the_keys_of_a_plugin_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(
        "from pydantic import BaseModel, Field\nfrom surogate_core.api import LoggerDef, provides\n"
        "SUROGATE_API = {'loggers': 1}\n"
        "class Options(BaseModel, extra='forbid', frozen=True):\n"
        "    acme_rate: float = Field(1.0, gt=0, description='The rate.')\n"
        "acme = LoggerDef(name='acme', summary='', options=Options, open=lambda info, options: None)\n"
        "surogate_loggers = provides([acme])\n"
    )
    (tmp_path / "run.yaml").write_text("model: m\nplugins: [acme.py]\n")
    result = CliRunner().invoke(app, ["schema", "--config", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    found = yaml.safe_load(result.stdout)["properties"]
    assert found["acme_rate"]["description"] == "The rate."
    assert "acme" in found["report_to"]["anyOf"][0]["anyOf"][0]["enum"]
