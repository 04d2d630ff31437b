"""Which of the installed kernels serves an op."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_plugins import DEFINITIONS, Install, installing, loaded

from surogate_core.api import Op, Target, Value
from surogate_core.errors import ConfigError, PluginError
from surogate_core.machine.devices import device
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import Resolved

GPU = Target(device("a100"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch, DEFINITIONS)


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
        return registry.kernel_for(acme_op(), GPU, recipe).provider

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
    found = load_registry().kernel_for(acme_op(), GPU, "acme")
    assert (found.provider, found.others) == ("acme-base", ("acme-owner",))
    with pytest.raises(PluginError, match="recipe: acme_base — no installed plugin provides it"):
        load_registry({"SUROGATE_PLUGINS": "-base"}).kernel_for(acme_op(), GPU, "acme")


def test_two_kernels_of_equal_rank_are_refused_with_the_key_that_chooses(install: Install) -> None:
    install("acme-owner", "1.0", "owner", OPS)
    install("acme-a", "1.0", "a", KERNELS.format("kernel('acme_op')"))
    install("acme-b", "1.0", "b", KERNELS.format("kernel('acme_op')"))
    with pytest.raises(PluginError) as refused:
        load_registry().kernel_for(acme_op(), GPU, "bf16")
    assert str(refused.value) == (
        "kernels of acme_op are provided by acme-a 1.0 and acme-b 1.0. Choose one: kernels: {acme_op: acme-a}"
    )


def test_the_key_kernels_chooses_who_serves_an_op(install: Install) -> None:
    install("acme-owner", "1.0", "owner", OPS + KERNELS.format("kernel('acme_op')"))
    install("acme-a", "1.0", "a", KERNELS.format("kernel('acme_op')"))
    install("acme-b", "1.0", "b", KERNELS.format("kernel('acme_op', ok=False)"))
    registry = load_registry()

    def chosen(distribution: str) -> Resolved:
        choices = loaded(kernels={"acme_op": distribution}).config.kernel_choices
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
        config = loaded(kernels=value).config
        assert (config.allows_references, config.kernel_choices) == (allowed, {})
    for wrong in ("fast", {"default": "fast"}, {"rmsnorm": 3}, ["compiled"]):
        with pytest.raises(
            ConfigError, match="kernels: must be compiled, allow_reference, or a mapping of kinds of ops"
        ):
            loaded(kernels=wrong)


def test_an_op_without_a_kernel_runs_the_reference_with_the_reasons(install: Install) -> None:
    install(
        "acme-owner",
        "1.0",
        "owner",
        OPS + KERNELS.format("kernel('acme_op', ('bf16', '*')), kernel('acme_op', ok=False)"),
    )
    resolved = load_registry().kernel_for(acme_op(), GPU, "bf16")
    assert (resolved.kernel, resolved.provider) == (None, "reference")
    assert resolved.refusals == (
        "acme-owner: supports dtypes (bf16, *), the op has (fp32, fp32)",
        "acme-owner: needs SM90",
    )
