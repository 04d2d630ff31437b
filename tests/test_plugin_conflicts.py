"""Names and keys that two plugins provide, and names that none provides."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_plugins import DEFINITIONS, Install, installing, loaded, outcome
from typer.testing import CliRunner

from surogate.cli.app import app
from surogate.config.keys import DISTRIBUTIONS, PACKAGES
from surogate.config.load import LoadedConfig, load_config
from surogate.runs.run import chosen_weight_format
from surogate_core.api import Op, Target
from surogate_core.errors import ConfigError, PluginError
from surogate_core.machine.devices import device
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import State


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch, DEFINITIONS)


def test_only_a_run_that_uses_a_name_is_refused_where_two_plugins_provide_it(install: Install) -> None:
    source = "@hookimpl\ndef surogate_recipes():\n    return [recipe('{}')]"
    install("surogate-recipe-fp9", "0.3.1", "fp9", source.format("fp9-hybrid"))
    install("zacme-fp9", "1.0", "zacme", source.format("fp9_hybrid"))
    assert load_registry().recipe("bf16").name == "bf16"
    with pytest.raises(PluginError) as refused:
        load_registry().recipe("fp9-hybrid")
    assert str(refused.value) == (
        "recipe 'fp9_hybrid' is provided by surogate-recipe-fp9 0.3.1 and zacme-fp9 1.0; uninstall one or set "
        "SUROGATE_PLUGINS=-zacme-fp9"
    )
    assert load_registry({"SUROGATE_PLUGINS": "-zacme-fp9"}).recipe("fp9_hybrid")


def test_definitions_of_core_cannot_be_replaced_or_switched_off(install: Install) -> None:
    kind = next(iter(load_registry().ops))
    install("acme-ops", "1.0", "acme", f"@hookimpl\ndef surogate_ops():\n    return [op('{kind}')]")
    with pytest.raises(PluginError) as refused:
        load_registry().kernel_for(Op(kind, (), ()), Target(device("h200")), "bf16")
    assert str(refused.value) == (
        f"op '{kind}' is provided by surogate-core 0.2.0 and acme-ops 1.0; uninstall one or set "
        "SUROGATE_PLUGINS=-acme-ops"
    )


def test_one_architecture_has_one_model(install: Install) -> None:
    source = "@hookimpl\ndef surogate_models():\n    return [model('{}', 'AcmeForCausalLM')]"
    install("acme-a", "1.0", "a", source.format("acme1"))
    install("acme-b", "1.0", "b", source.format("acme2"))
    with pytest.raises(PluginError, match=r"architecture 'AcmeForCausalLM' is provided by acme-a 1.0 and acme-b 1.0"):
        load_registry().model_for({"architectures": ["AcmeForCausalLM"]})
    assert load_registry().model_for({"architectures": ["Qwen3ForCausalLM"]})


OPTIONS = """
class Options(NoOptions):
    acme_rate: float = 0.1
@hookimpl
def surogate_optimizers():
    return [optimizer('{}', Options)]
"""


WEIGHT_FORMAT = """
class Options(NoOptions):
    acme_weights: bool = False
@hookimpl
def surogate_weight_formats():
    return [WeightFormatDef(name='{}', summary='', options=Options, key='acme_weights',
                            quantize=lambda *a: [], dequantize=lambda *a: None)]
"""


def test_two_weight_formats_cannot_have_one_key(install: Install) -> None:
    install("acme-a", "1.0", "a", WEIGHT_FORMAT.format("acme_a"))
    install("acme-b", "2.0", "b", WEIGHT_FORMAT.format("acme_b"))

    def chosen(**keys: object) -> object:
        registry = load_registry()
        config = {"model": "m", "lora": True, **keys}
        return chosen_weight_format(load_config(config, registry=registry, mode="sft", source="run.yaml"), registry)

    assert chosen() is None
    with pytest.raises(
        PluginError, match=r"key of a weight format 'acme_weights' is provided by acme-a 1\.0 and acme-b"
    ):
        chosen(acme_weights=True)


def load_options(**keys: object) -> LoadedConfig:
    return loaded(optimizer="acme_a", **keys)


def test_an_option_that_two_plugins_declare_differently_is_refused_where_it_is_set(install: Install) -> None:
    install("acme-a", "1.0", "a", OPTIONS.format("acme_a"))
    install("acme-b", "2.0", "b", OPTIONS.format("acme_b").replace("0.1", "0.2"))
    load_options()
    with pytest.raises(PluginError) as refused:
        load_options(acme_rate=0.3)
    assert str(refused.value).endswith(
        "option 'acme_rate' is provided by acme-a 1.0 and acme-b 2.0; uninstall one or set SUROGATE_PLUGINS=-acme-b"
    )


RECIPE_OPTIONS = """
class Options(NoOptions):
    acme_rate: float = 0.1
@hookimpl
def surogate_recipes():
    return [dataclasses.replace(recipe('acme_b'), options=Options)]
"""


def test_two_optimizers_share_an_option_key_that_both_declare_alike(install: Install) -> None:
    """A run uses one of them. A recipe would be used together with an optimizer."""
    install("acme-a", "1.0", "a", OPTIONS.format("acme_a"))
    install("acme-b", "2.0", "b", OPTIONS.format("acme_b"))
    models = load_registry().options_models()
    assert all(set(models["optimizer", name].model_fields) == {"acme_rate"} for name in ("acme_a", "acme_b"))
    install("acme-c", "2.0", "c", "import dataclasses\n" + RECIPE_OPTIONS)
    with pytest.raises(PluginError, match=r"option 'acme_rate' is provided by acme-a 1\.0 and acme-c 2\.0"):
        load_options(acme_rate=0.3)


def test_plugins_share_an_option_key_by_inheriting_it(install: Install) -> None:
    install("acme-a", "1.0", "a", OPTIONS.format("acme_a"))
    install(
        "acme-b",
        "2.0",
        "b",
        """
        from acme_a_a import Options as Base
        class Options(Base):
            acme_block: int = 256
        @hookimpl
        def surogate_optimizers():
            return [optimizer('acme_b', Options)]
        """,
    )
    models = load_registry().options_models()
    assert set(models["optimizer", "acme_b"].model_fields) == {"acme_rate", "acme_block"}


def test_a_plugin_with_an_option_of_core_is_broken_and_stops_only_runs_that_use_it(
    install: Install,
) -> None:
    install("acme-a", "1.0", "a", OPTIONS.format("acme_a").replace("acme_rate", "learning_rate"))
    registry = load_registry()
    assert outcome(registry, "a").state is State.BROKEN
    assert outcome(registry, "a").reason == (
        "plugin acme-a 1.0 failed in surogate_optimizers(): option 'learning_rate' of optimizer 'acme_a' is a key of "
        "the config itself; it needs another name"
    )
    listed = CliRunner().invoke(app, ["plugins"])
    assert listed.exit_code == 2 and "broken" in listed.output and "is a key of the config itself" in listed.output
    assert load_config({"model": "m"}, registry=registry, source="run.yaml").config.learning_rate == 2e-4
    with pytest.raises(PluginError, match=r"optimizer: acme_a .*acme-a 1.0.*is a key of the config itself"):
        load_config({"model": "m", "optimizer": "acme_a"}, registry=registry, source="run.yaml")


def test_an_option_of_a_format_cannot_be_a_key_of_every_dataset_entry(install: Install) -> None:
    install(
        "acme-f",
        "1.0",
        "f",
        """
        class Options(BaseModel):
            weight: float = 1.0
        @hookimpl
        def surogate_dataset_formats():
            return [DatasetFormatDef(name="f", summary="", options=Options, matches=lambda c: False,
                                     fields=lambda o: [], encode=lambda r, t, o: None)]
        """,
    )
    assert "option 'weight' of format 'f' is a key of the config itself" in outcome(load_registry(), "f").reason


# ------------------------------------------------------------------------------------------------------------- missing


def test_only_a_package_of_this_project_is_suggested_to_install() -> None:
    """A name made from a word that the user typed could belong to anybody."""
    registry = load_registry()
    assert str(registry.missing("logger", "wandb")).endswith(" Try: pip install surogate-log-wandb")
    for kind, name in (("recipe", "fp6"), ("recipe", "nvfp6"), ("optimizer", "lion"), ("logger", "comet")):
        text = str(registry.missing(kind, name))
        assert text.startswith(f"{kind}: {name} — no installed plugin provides it. ") and "pip" not in text


def test_an_installed_optimizer_is_the_alternative_to_one_that_is_not() -> None:
    """The default is in a package of its own."""
    registry = load_registry()
    assert "adamw" in registry.names("optimizer")
    text = str(registry.missing("optimizer", "adamw_8bit"))
    assert text.endswith(" Try: pip install surogate-optim-adamw-8bit, or optimizer: adamw")


def test_every_package_that_is_suggested_is_one_of_this_repository() -> None:
    root = Path(__file__).parents[1]
    projects = [*root.glob("*/pyproject.toml"), *root.glob("plugins/*/pyproject.toml")]
    ours = {tomllib.loads(path.read_text())["project"]["name"] for path in projects}
    assert {*DISTRIBUTIONS.values(), *PACKAGES.values()} <= ours


def test_a_missing_recipe_mentions_the_broken_plugin_that_might_provide_it(install: Install, tmp_path: Path) -> None:
    install("surogate-recipe-nvfp4", "9.9", "nvfp4", head="", source="raise OSError('libcublasLt.so.13: not found')")
    with pytest.raises(PluginError) as missing:
        load_registry().recipe("nvfp4")
    assert str(missing.value) == (
        "recipe: nvfp4 — no installed plugin provides it. Installed: bf16, fp8-hybrid. Installed but not loaded: "
        "nvfp4 of surogate-recipe-nvfp4 9.9 (broken: import of surogate_recipe_nvfp4_nvfp4 failed: "
        f"OSError: libcublasLt.so.13: not found ({tmp_path.name}/surogate_recipe_nvfp4_nvfp4.py:1))."
    )


def test_a_switched_off_recipe_says_so() -> None:
    with pytest.raises(PluginError, match=r"bf16 of surogate-recipe-bf16 0.2.0 \(blocked: switched off by SUROGATE_PL"):
        load_registry({"SUROGATE_PLUGINS": "-bf16"}).recipe("bf16")


def test_an_unknown_architecture_lists_what_is_supported() -> None:
    with pytest.raises(ConfigError) as unknown:
        load_registry().model_for({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    assert "['MambaForCausalLM'] and model_type 'mamba'" in str(unknown.value)
    assert "Qwen3ForCausalLM" in str(unknown.value)


def test_a_model_is_found_by_architecture_else_by_model_type() -> None:
    registry = load_registry()
    by_architecture = registry.model_for({"architectures": ["Qwen3ForCausalLM"]})
    assert registry.model_for({"model_type": "qwen3"}) is by_architecture
