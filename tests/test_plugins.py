"""Discovery, the registry and their messages, with distributions made for each test."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_plugins import Install, installing
from typer.testing import CliRunner

from surogate_core.api import API, DeviceInfo, Op, SystemInfo, Target, Value
from surogate_core.cli.app import app
from surogate_core.config.keys import DISTRIBUTIONS, PACKAGES
from surogate_core.config.load import LoadedConfig, load_config
from surogate_core.errors import ConfigError, PluginError
from surogate_core.machine.devices import device
from surogate_core.planning.run import chosen_weight_format
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import Plugin, State
from surogate_core.plugins.registry import Registry, Resolved

CPU = DeviceInfo(
    name="cpu",
    title="CPU",
    sm=None,
    memory_bytes=2**34,
    flops={"fp32": 1e11},
    bandwidth=1e10,
    launch_seconds=1e-5,
    runtime_bytes=0,
    source="made up",
)

HEAD = """
import pluggy
from pydantic import BaseModel
from surogate_core.api import *
SUROGATE_API = 0
hookimpl = pluggy.HookimplMarker("surogate")

def optimizer(name, options=NoOptions):
    return OptimizerDef(name=name, summary="", options=options, update=lambda *a: None)
def op(kind):
    return OpDef(kind=kind, infer=lambda ins, attrs: [], reference="surogate_core.reference.ops:up")
def kernel(op, dtypes=("fp32", "fp32"), ok=True):
    return KernelDef(op=op, dtypes=dtypes, supports=lambda o, d: Support(ok, "" if ok else "needs SM90"),
                     bind=lambda op, context: (print, ()))
def recipe(name):
    return RecipeDef(name=name, summary="", precision=lambda r, o: None,
                     supports=lambda d, p, o: Support(True), lower=lambda family, context: family)
def model(name, architecture):
    return ModelDef(name=name, summary="", architectures=(architecture,), model_types=(name,),
                    dims=lambda c: None, build=lambda b, d, i: None, weights=lambda d: ())
"""

FIRST_PARTY = (
    *("builtin", "models", "bf16", "fp8", "adamw", "adamw_8bit", "normuon", "lora", "tensorboard", "wandb"),
    "offload_residual",
    "offload_states",
    *("qlora_nf4", "qlora_fp8", "qlora_fp4"),
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch, HEAD)


def outcome(registry: Registry, name: str) -> Plugin:
    return next(plugin for plugin in registry.plugins if plugin.name == name)


# -------------------------------------------------------------------------------------------------------------- states


def test_a_plugin_is_loaded_and_its_definitions_carry_their_origin(install: Install) -> None:
    install(
        "acme-optim",
        "1.2",
        "acme",
        "@hookimpl\ndef surogate_optimizers():\n    return [optimizer('acme_sgd')]",
    )
    registry = load_registry()
    assert outcome(registry, "acme").state is State.LOADED
    source = registry.source("optimizer", "acme-sgd")
    assert (source.name, str(source.plugin)) == ("acme_sgd", "acme-optim 1.2")


def test_first_party_plugins_are_loaded() -> None:
    registry = load_registry()
    assert {plugin.name: plugin.state for plugin in registry.plugins} == dict.fromkeys(FIRST_PARTY, State.LOADED)
    assert registry.notices == ()
    for kind in ("model", "op", "recipe", "optimizer", "format", "launcher", "logger"):
        assert registry.names(kind), kind


@pytest.mark.parametrize("switch", ["-acme", "-acme-optim", "-acme_optim", "-other, -acme"])
def test_a_plugin_is_switched_off_by_its_name_or_its_distribution(install: Install, switch: str) -> None:
    install("acme-optim", "1.2", "acme", "raise RuntimeError('imported')")
    registry = load_registry({"SUROGATE_PLUGINS": switch})
    assert outcome(registry, "acme").state is State.BLOCKED
    expected = ["SUROGATE_PLUGINS: no plugin or distribution is called 'other'"] if "other" in switch else []
    assert list(registry.notices) == expected


def test_the_off_switch_can_only_switch_off() -> None:
    with pytest.raises(PluginError, match="'acme' must be '-name': plugins can only be switched off"):
        load_registry({"SUROGATE_PLUGINS": "-bf16,acme"})


def test_a_broken_plugin_keeps_its_exception_and_does_not_affect_others(install: Install) -> None:
    install("acme-bad", "0.3", "bad", "import no_such_module")
    install("acme-optim", "1.2", "zebra", "@hookimpl\ndef surogate_optimizers():\n    return [optimizer('acme_sgd')]")
    registry = load_registry()
    bad = outcome(registry, "bad")
    assert bad.state is State.BROKEN
    assert isinstance(bad.error, ModuleNotFoundError)
    assert registry.notices == (
        "plugin 'bad' of acme-bad 0.3 is not loaded: import of acme_bad_bad failed: "
        "ModuleNotFoundError: No module named 'no_such_module'",
    )
    assert registry.get("optimizer", "acme_sgd")


def test_a_plugin_that_exits_at_import_is_broken_and_the_program_continues(install: Install) -> None:
    install("acme-bad", "0.3", "bad", "raise SystemExit(0)")
    assert outcome(load_registry(), "bad").state is State.BROKEN


def test_neither_of_two_plugins_with_the_same_name_is_loaded(install: Install) -> None:
    source = "@hookimpl\ndef surogate_optimizers():\n    return [optimizer('{}')]"
    install("acme-a", "1.0", "twin", source.format("from_a"))
    install("acme-b", "2.0", "twin", source.format("from_b"))
    registry = load_registry()
    twins = [plugin for plugin in registry.plugins if plugin.name == "twin"]
    assert [plugin.state for plugin in twins] == [State.DUPLICATE, State.DUPLICATE]
    assert twins[0].reason == "acme-b 2.0 also has a plugin 'twin'; uninstall one or set SUROGATE_PLUGINS=-acme-b"
    assert not {"from_a", "from_b"} & set(registry.names("optimizer"))

    registry = load_registry({"SUROGATE_PLUGINS": "-acme-b"})
    assert "from_a" in registry.names("optimizer")
    assert "from_b" not in registry.names("optimizer")


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (f"SUROGATE_API = {API + 1}", f"is written for API {API + 1}, surogate-core 0.1.0 has API {API}. "
                                      "Try: pip install -U surogate-core"),
        (f"SUROGATE_API = {API - 1}", f"is written for API {API - 1}, surogate-core 0.1.0 has API {API}. "
                                      "Try: pip install -U acme-old"),
        ("", f"declares no SUROGATE_API; surogate-core 0.1.0 has API {API}. Try: pip install -U acme-old"),
        ("SUROGATE_API = '0'", f"has SUROGATE_API = '0', not an int; surogate-core 0.1.0 has API {API}. "
                               "Try: pip install -U acme-old"),
    ],
)  # fmt: skip
def test_a_plugin_for_another_api_shows_both_numbers_and_the_pip_command(
    install: Install, states: str, reason: str
) -> None:
    install("acme-old", "0.9", "old", states, head="")
    registry = load_registry()
    assert outcome(registry, "old").state is State.WRONG_API
    assert outcome(registry, "old").reason == f"acme_old_old {reason}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "@hookimpl\ndef surogate_optimisers():\n    return []",
            "failed in surogate_optimisers(): is an unknown hook; did you mean surogate_optimizers?",
        ),
        (
            "def surogate_optimizers():\n    return []",
            "failed in surogate_optimizers(): is not marked as a hook: decorate it with "
            '@pluggy.HookimplMarker("surogate")',
        ),
        (
            "@hookimpl\ndef optimizers():\n    return []",
            "failed in optimizers(): is marked as a hook, but names of hooks start with surogate_",
        ),
        (
            "@hookimpl\ndef surogate_optimizers(registry=None):\n    return []",
            "failed in surogate_optimizers(): argument 'registry' has a default; hooks take none",
        ),
        (
            "@hookimpl(wrapper=True)\ndef surogate_optimizers():\n    return (yield)",
            "failed in surogate_optimizers(): is a wrapper; hooks only return lists",
        ),
        ("@hookimpl\ndef surogate_optimizers(extra):\n    return []", "failed in registration: "),
        (
            "@hookimpl\ndef surogate_optimizers():\n    return {}['key']",
            "failed in surogate_optimizers(): KeyError: 'key'",
        ),
        (
            "@hookimpl\ndef surogate_optimizers():\n    pass",
            "failed in surogate_optimizers(): TypeError: 'NoneType' object is not iterable",
        ),
        (
            "@hookimpl\ndef surogate_optimizers():\n    return [recipe('x')]",
            "failed in surogate_optimizers(): returned RecipeDef in its list, expected OptimizerDef",
        ),
    ],
)
def test_a_wrong_hook_names_plugin_version_and_hook(install: Install, source: str, reason: str) -> None:
    install("surogate-recipe-x", "0.2", "x", source)
    registry = load_registry()
    assert outcome(registry, "x").state is State.BROKEN
    assert outcome(registry, "x").reason.startswith(f"plugin surogate-recipe-x 0.2 {reason}")


def test_a_plugin_that_fails_in_one_hook_contributes_nothing(install: Install) -> None:
    install(
        "acme-half",
        "1.0",
        "half",
        """
        @hookimpl
        def surogate_ops():
            return [op("half_op")]
        @hookimpl
        def surogate_optimizers():
            raise RuntimeError("no")
        """,
    )
    registry = load_registry()
    assert "half_op" not in registry.ops


# ----------------------------------------------------------------------------------------------------------- conflicts


def test_only_a_run_that_uses_a_name_is_refused_where_two_plugins_provide_it(install: Install) -> None:
    source = "@hookimpl\ndef surogate_recipes():\n    return [recipe('{}')]"
    install("surogate-recipe-fp9", "0.3.1", "fp9", source.format("fp9-hybrid"))
    install("zacme-fp9", "1.0", "zacme", source.format("fp9_hybrid"))
    assert load_registry().get("recipe", "bf16").name == "bf16"
    with pytest.raises(PluginError) as refused:
        load_registry().get("recipe", "fp9-hybrid")
    assert str(refused.value) == (
        "recipe 'fp9_hybrid' is provided by surogate-recipe-fp9 0.3.1 and zacme-fp9 1.0; uninstall one or set "
        "SUROGATE_PLUGINS=-zacme-fp9"
    )
    assert load_registry({"SUROGATE_PLUGINS": "-zacme-fp9"}).get("recipe", "fp9_hybrid")


def test_definitions_of_core_cannot_be_replaced_or_switched_off(install: Install) -> None:
    kind = next(iter(load_registry().ops))
    install("acme-ops", "1.0", "acme", f"@hookimpl\ndef surogate_ops():\n    return [op('{kind}')]")
    with pytest.raises(PluginError) as refused:
        load_registry().kernel_for(replace(acme_op(), kind=kind), Target(CPU), "bf16")
    assert str(refused.value) == (
        f"op '{kind}' is provided by surogate-core 0.1.0 and acme-ops 1.0; uninstall one or set "
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
    return load_options_of(optimizer="acme_a", **keys)


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
        "core's config; it needs another name"
    )
    listed = CliRunner().invoke(app, ["plugins"])
    assert listed.exit_code == 2 and "broken" in listed.output and "is a key of core's config" in listed.output
    assert load_config({"model": "m"}, registry=registry, source="run.yaml").config.learning_rate == 2e-4
    with pytest.raises(PluginError, match=r"optimizer: acme_a .*acme-a 1.0.*is a key of core's config"):
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
    assert "option 'weight' of format 'f' is a key of core's config" in outcome(load_registry(), "f").reason


# ------------------------------------------------------------------------------------------------------------- missing


def test_only_a_package_of_this_project_is_suggested_to_install() -> None:
    """A name made from a word that the user typed could belong to anybody."""
    registry = load_registry()
    assert str(registry.missing("logger", "wandb")).endswith(" Try: pip install surogate-log-wandb")
    for kind, name in (("recipe", "fp6"), ("recipe", "nvfp4"), ("optimizer", "lion"), ("logger", "mlflow")):
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


def test_a_missing_recipe_mentions_the_broken_plugin_that_might_provide_it(install: Install) -> None:
    install("surogate-recipe-nvfp4", "0.1.0", "nvfp4", "raise OSError('libcublasLt.so.13: not found')")
    with pytest.raises(PluginError) as missing:
        load_registry().get("recipe", "nvfp4")
    assert str(missing.value) == (
        "recipe: nvfp4 — no installed plugin provides it. Installed: bf16, fp8-hybrid. Installed but not loaded: "
        "nvfp4 of surogate-recipe-nvfp4 0.1.0 (broken: import of surogate_recipe_nvfp4_nvfp4 failed: "
        "OSError: libcublasLt.so.13: not found)."
    )
    assert missing.value.distribution == "surogate-recipe-nvfp4"


def test_a_switched_off_recipe_says_so() -> None:
    with pytest.raises(PluginError, match=r"bf16 of surogate-recipe-bf16 0.1.0 \(blocked: switched off by SUROGATE_PL"):
        load_registry({"SUROGATE_PLUGINS": "-bf16"}).get("recipe", "bf16")


def test_an_unknown_architecture_lists_what_is_supported() -> None:
    with pytest.raises(ConfigError) as unknown:
        load_registry().model_for({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    assert "['MambaForCausalLM'] and model_type 'mamba'" in str(unknown.value)
    assert "Qwen3ForCausalLM" in str(unknown.value)


def test_a_model_is_found_by_architecture_else_by_model_type() -> None:
    registry = load_registry()
    by_architecture = registry.model_for({"architectures": ["Qwen3ForCausalLM"]})
    assert registry.model_for({"model_type": "qwen3"}) is by_architecture


# ------------------------------------------------------------------------------------------------------------- kernels

KERNELS = "\n@hookimpl\ndef surogate_kernels():\n    return [{}]\n"
OPS = "\n@hookimpl\ndef surogate_ops():\n    return [op('acme_op')]\n"
RECIPES = "\n@hookimpl\ndef surogate_recipes():\n    return [recipe('acme')]\n"


def acme_op() -> Op:
    return Op("acme_op", (Value("x", (4,), "fp32", "act"),), (Value("y", (4,), "fp32", "act"),))


def test_kernels_of_the_recipe_come_first_then_those_of_the_op_then_others(install: Install) -> None:
    install("acme-owner", "1.0", "owner", OPS + KERNELS.format("kernel('acme_op')"))
    install("acme-recipe", "1.0", "recipe", RECIPES + KERNELS.format("kernel('acme_op')"))
    install("acme-third", "1.0", "third", KERNELS.format("kernel('acme_op')"))

    def provider(recipe: str, off: str = "") -> str:
        registry = load_registry({"SUROGATE_PLUGINS": off})
        return registry.kernel_for(acme_op(), Target(CPU), recipe).provider

    assert load_registry().source("op", "acme_op").plugin.distribution == "acme-owner"
    assert provider("acme") == "acme-recipe"
    assert provider("bf16", "-recipe") == "acme-owner"


def test_a_recipe_builds_on_the_kernels_of_other_recipes(install: Install) -> None:
    kernels = KERNELS.format("kernel('acme_op')")
    install("acme-base", "1.0", "base", RECIPES.replace("acme", "acme_base") + kernels)
    builds = "\nimport dataclasses\n" + RECIPES.replace(
        "recipe('acme')", "dataclasses.replace(recipe('acme'), kernels_of=('acme_base',))"
    )
    install("acme-recipe", "1.0", "recipe", builds)
    install("acme-owner", "1.0", "owner", OPS + kernels)
    found = load_registry().kernel_for(acme_op(), Target(CPU), "acme")
    assert (found.provider, found.others) == ("acme-base", ("acme-owner",))
    with pytest.raises(PluginError, match="recipe: acme_base — no installed plugin provides it"):
        load_registry({"SUROGATE_PLUGINS": "-base"}).kernel_for(acme_op(), Target(CPU), "acme")


def test_two_kernels_of_equal_rank_are_refused_with_the_key_that_chooses(install: Install) -> None:
    install("acme-owner", "1.0", "owner", OPS)
    install("acme-a", "1.0", "a", KERNELS.format("kernel('acme_op')"))
    install("acme-b", "1.0", "b", KERNELS.format("kernel('acme_op')"))
    with pytest.raises(PluginError) as refused:
        load_registry().kernel_for(acme_op(), Target(CPU), "bf16")
    assert str(refused.value) == (
        "kernels of acme_op are provided by acme-a 1.0 and acme-b 1.0. Choose one: kernels: {acme_op: acme-a}"
    )


def test_the_key_kernels_chooses_who_serves_an_op(install: Install) -> None:
    install("acme-owner", "1.0", "owner", OPS + KERNELS.format("kernel('acme_op')"))
    install("acme-a", "1.0", "a", KERNELS.format("kernel('acme_op')"))
    install("acme-b", "1.0", "b", KERNELS.format("kernel('acme_op', ok=False)"))
    registry = load_registry()

    def chosen(distribution: str) -> Resolved:
        choices = load_options_of(kernels={"acme_op": distribution}).config.kernel_choices
        registry.check_kernel_choices(choices)
        return registry.kernel_for(acme_op(), Target(device("h200")), "bf16", choices)

    assert chosen("acme_a").provider == "acme-a" and chosen("acme-a").others == ("acme-owner",)
    with pytest.raises(ConfigError, match=r"kernels: acme_op: acme-b: needs SM90\. Name another package"):
        chosen("acme-b")
    with pytest.raises(
        ConfigError, match=r"kernels: acme_op: acme-c has no kernel for this op\. .*acme-a, acme-b, acme-o"
    ):
        chosen("acme-c")
    with pytest.raises(
        ConfigError, match=r"kernels: rmsnrm: no installed plugin defines such an op; did you mean rmsnorm"
    ):
        registry.check_kernel_choices({"rmsnrm": "acme-a"})


def test_the_words_of_the_key_kernels_stay_valid_alone_and_as_the_default_of_a_mapping() -> None:
    for value, allowed in (("compiled", False), ("allow_reference", True), ({"default": "Allow-Reference"}, True)):
        config = load_options_of(kernels=value).config
        assert (config.allows_references, config.kernel_choices) == (allowed, {})
    for wrong in ("fast", {"default": "fast"}, {"rmsnorm": 3}, ["compiled"]):
        with pytest.raises(
            ConfigError, match="kernels: must be compiled, allow_reference, or a mapping of kinds of ops"
        ):
            load_options_of(kernels=wrong)


def load_options_of(**keys: object) -> LoadedConfig:
    return load_config({"model": "m", **keys}, registry=load_registry(), mode="train", source="run.yaml")


def test_an_op_without_a_kernel_runs_the_reference_with_the_reasons(install: Install) -> None:
    install(
        "acme-owner",
        "1.0",
        "owner",
        OPS + KERNELS.format("kernel('acme_op', ('bf16', '*')), kernel('acme_op', ok=False)"),
    )
    resolved = load_registry().kernel_for(acme_op(), Target(CPU), "bf16")
    assert (resolved.kernel, resolved.provider) == (None, "reference")
    assert resolved.refusals == (
        "acme-owner: supports dtypes (bf16, *), the op has (fp32, fp32)",
        "acme-owner: needs SM90",
    )


# ------------------------------------------------------------------------------------------------- commands and doctor


def test_a_failing_diagnosis_is_a_finding(install: Install) -> None:
    install("acme-doc", "1.0", "doc", "@hookimpl\ndef surogate_diagnose(system):\n    return [1 / 0]")
    system = SystemInfo(python="3.11", platform="x", cpu_count=1, memory_bytes=2**34)
    findings = [finding for plugin, finding in load_registry().diagnose(system) if plugin.name == "doc"]
    assert [finding.level for finding in findings] == ["error"]
    assert findings[0].message == (
        "plugin acme-doc 1.0 failed in surogate_diagnose(): ZeroDivisionError: division by zero"
    )


def test_the_plugins_command_shows_state_and_exception(install: Install) -> None:
    install("acme-bad", "0.3", "bad", "import no_such_module")
    result = CliRunner().invoke(app, ["plugins"])
    assert result.exit_code == 2
    assert "recipe bf16" in result.output
    assert "ModuleNotFoundError: No module named 'no_such_module'" in result.output

    listed = json.loads(CliRunner().invoke(app, ["plugins", "--json"]).output)
    states = {plugin["name"]: plugin["state"] for plugin in listed["plugins"]}
    assert states == dict.fromkeys(FIRST_PARTY, "loaded") | {"bad": "broken"}


def test_the_plugins_command_shows_conflicts_and_fails(install: Install) -> None:
    install("acme-a", "1.0", "a", "@hookimpl\ndef surogate_recipes():\n    return [recipe('bf16')]")
    result = CliRunner().invoke(app, ["plugins"])
    assert result.exit_code == 2
    assert "recipe 'bf16' is provided by acme-a 1.0 and surogate-recipe-bf16 0.1.0" in result.output


def test_a_command_of_another_distribution_is_listed_without_import_and_runs(install: Install) -> None:
    source = "print('imported')\ndef command(name: str) -> int:\n    print('hi', name)\n    return 5"
    install("acme-commands", "1.0", "hello", source, group="surogate.commands", head="")
    helped = CliRunner().invoke(app, ["--help"])
    assert "From acme-commands 1.0." in helped.output
    assert "imported" not in helped.output
    ran = CliRunner().invoke(app, ["hello", "world"])
    assert (ran.exit_code, ran.output) == (5, "imported\nhi world\n")


def test_a_command_cannot_replace_one_of_core(install: Install) -> None:
    install(
        "acme-commands",
        "1.0",
        "doctor",
        "def command() -> None:\n    print('mine')",
        group="surogate.commands",
        head="",
    )
    assert "mine" not in CliRunner().invoke(app, ["doctor"]).output
    listed = json.loads(CliRunner().invoke(app, ["plugins", "--json"]).output)
    assert [command["problem"] for command in listed["commands"]] == [
        "'doctor' is a command of surogate itself and cannot be replaced"
    ]


def test_a_broken_command_names_its_distribution(install: Install) -> None:
    install("acme-commands", "1.0", "oops", "import no_such_module", group="surogate.commands", head="")
    result = CliRunner().invoke(app, ["oops"])
    assert result.exit_code == 2
    assert (
        "command 'oops' of acme-commands 1.0 cannot be used: acme_commands_oops:command: ModuleNotFoundError"
        in result.output
    )
