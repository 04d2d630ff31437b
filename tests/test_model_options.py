"""Options of a model: keys of a run's config that its sizes hold. Which model a run trains is known from its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from end_to_end.product import MODEL_CONFIG as QWEN
from routed_family import CONFIG, MODEL, OPS, RoutedOptions, write_config
from typer.testing import CliRunner

from surogate import run
from surogate.cli.app import app
from surogate.config.load import resolved
from surogate.fitting.changes import changed
from surogate_core import Definitions, train_from
from surogate_core.api import ModelDef
from surogate_core.errors import ConfigError, PluginError
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.given import with_given

KEY = "acme_balance_weight"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(folder: Path, **changes: Any) -> run.Run:
    return run.open_run(run.load(write_config(folder, **changes)))


def test_a_key_reaches_the_sizes_that_the_functions_of_the_model_get(tmp_path: Path) -> None:
    found = opened(tmp_path, acme_balance_weight="0.5")
    assert vars(found.dims) == {**vars(MODEL.dims(CONFIG)), "balance": 0.5} == vars(found.model.dims(CONFIG))
    planned = run.plan(found, "cpu")
    (op,) = [op for op in planned.assembly.programs["micro_first"].ops if op.attrs.get("of") == "acme_balance"]
    assert planned.inputs.dims == found.dims and "'weight': 0.5" in str(op.attrs)
    assert opened(tmp_path).dims.balance == 0.01  # the default


def test_a_config_that_a_run_writes_has_every_option_of_its_model(tmp_path: Path) -> None:
    loaded = run.load(write_config(tmp_path))
    assert KEY not in resolved(loaded)  # which model it is, is not known yet
    assert resolved(run.open_run(loaded).loaded)[KEY] == 0.01
    given = run.load(write_config(tmp_path, acme_balance_weight=0.5))
    assert resolved(given)[KEY] == 0.5 == resolved(run.open_run(given).loaded)[KEY]
    again = changed(run.open_run(given), {"per_device_train_batch_size": 1})
    assert again.model_options.model_dump() == {KEY: 0.5} and not again.loaded.notices


@pytest.mark.parametrize("value", ["much", -1, True, ".nan"])
def test_a_wrong_value_is_an_error_that_names_the_key_whatever_the_model(tmp_path: Path, value: Any) -> None:
    for model in (CONFIG, QWEN):
        with pytest.raises(ConfigError, match=rf"{KEY}: must be"):
            run.load(write_config(tmp_path, model, acme_balance_weight=value))


def test_a_misspelt_key_is_an_error_that_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="acme_balance_weigth: unknown key; did you mean acme_balance_weight"):
        run.load(write_config(tmp_path, acme_balance_weigth=1))


def test_a_key_of_another_model_has_no_effect_and_a_notice_says_so(tmp_path: Path) -> None:
    other = opened(tmp_path, model=QWEN, acme_balance_weight=0.5)
    assert other.loaded.notices == (f"{KEY}: has no effect, since model acme_routed is not used by this run",)
    assert KEY not in resolved(other.loaded)
    assert not opened(tmp_path, model=QWEN).loaded.notices
    assert f"{KEY}: has no effect" in " ".join(run.plan(other, "cpu").overridden)


def test_a_run_names_a_changed_option_when_it_is_resumed(tmp_path: Path) -> None:
    path = write_config(tmp_path, acme_balance_weight=0.5)
    run.train(run.load(path))
    written = yaml.safe_load((tmp_path / "out/run.yaml").read_text())
    assert written[KEY] == 0.5
    again = write_config(tmp_path, acme_balance_weight=0.25, max_steps=2, resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=rf"was saved with {KEY}: 0.5 \(this run: 0.25\)"):
        run.train(run.load(again))


def test_the_schema_and_the_model_card_have_the_key(tmp_path: Path) -> None:
    path = write_config(tmp_path, acme_balance_weight=0.5)
    printed = CliRunner().invoke(app, ["schema", "--config", str(path)])
    schema = json.loads(printed.stdout)["properties"][KEY]
    assert "balances the experts" in schema["description"]
    run.train(run.load(path))
    assert f"| {KEY} | 0.5 |" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("learning_rate", "option 'learning_rate' of model 'acme_routed' is a key of the config itself"),
        ("acme_needed", "options of model 'acme_routed': acme_needed has no default"),
    ],
)
def test_options_of_a_model_are_checked_as_those_of_other_definitions_are(key: str, says: str) -> None:
    options = type("Options", (RoutedOptions,), {"__annotations__": {key: int}})
    with pytest.raises(PluginError, match=says):
        with_given(load_registry(), [replace(MODEL, options=options)])


def fails(dims: Any, options: Any) -> Any:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (replace(MODEL, configure=fails), r"model acme_routed .* failed in configure: KeyError: 'boom'"),
        (replace(MODEL, configure=lambda dims, options: None), r"configure.*returned None, expected Dims"),
    ],
)
def test_an_error_in_configure_names_the_plugin(model: ModelDef, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        given = Definitions(model=CONFIG, recipe="bf16", optimizer="adamw", given=[model, *OPS])
        train_from(given, [np.ones((1, 4), int)], learning_rate=0.1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": {"acme_balance": 1}}, "options of the model: acme_balance: .* Its options: acme_balance_weight"),
        ({"models": {}}, "options: models has none. Give those of model, recipe, optimizer or loss"),
    ],
)
def test_options_of_a_model_in_a_script_are_checked(options: Any, says: str) -> None:
    given = Definitions(model=CONFIG, recipe="bf16", optimizer="adamw", given=[MODEL, *OPS], options=options)
    with pytest.raises(ConfigError, match=says):
        train_from(given, [np.ones((1, 4), int)], learning_rate=0.1)
