"""Discovery of plugins: what is loaded, and why not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_plugins import DEFINITIONS, FIRST_PARTY, Install, installing, outcome

from surogate_core import __version__
from surogate_core.errors import PluginError
from surogate_core.plugins import versions
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.hookspecs import HOOKS
from surogate_core.plugins.provided import State
from surogate_core.plugins.versions import SERVED


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch, DEFINITIONS)


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


def test_a_hook_is_a_marked_function_or_what_provides_returns(install: Install) -> None:
    install(
        "acme-optim",
        "1.2",
        "acme",
        """
        surogate_optimizers = provides([optimizer('acme_sgd')])
        @hookimpl
        def surogate_ops():
            return [op('acme_op')]
        """,
    )
    registry = load_registry()
    assert registry.optimizer("acme_sgd").origin.kind == "optimizer"
    assert registry.ops["acme_op"].origin.kind == "op"


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
    with pytest.raises(PluginError, match="'acme' must be '-name', which switches a plugin off, or a file"):
        load_registry({"SUROGATE_PLUGINS": "-bf16,acme"})


def test_a_broken_plugin_keeps_its_exception_and_does_not_affect_others(install: Install, tmp_path: Path) -> None:
    install("acme-bad", "0.3", "bad", "import no_such_module")
    install("acme-optim", "1.2", "zebra", "@hookimpl\ndef surogate_optimizers():\n    return [optimizer('acme_sgd')]")
    registry = load_registry()
    bad = outcome(registry, "bad")
    assert bad.state is State.BROKEN
    assert isinstance(bad.error, ModuleNotFoundError)
    line = len(DEFINITIONS.splitlines()) + 1
    assert registry.notices == (
        "plugin 'bad' of acme-bad 0.3 is not loaded: import of acme_bad_bad failed: "
        f"ModuleNotFoundError: No module named 'no_such_module' ({tmp_path.name}/acme_bad_bad.py:{line})",
    )
    assert registry.optimizer("acme_sgd")


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


PAGE = "docs/reference/hooks.md"
SEE = f"and see {PAGE} for what changed. Try: pip install -U acme-old"
OPS = """
    from surogate_core.api import provides
    surogate_ops, surogate_models = provides([]), provides([])
"""


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ("", "declares no SUROGATE_API, not a number for each hook. Write "
             f'SUROGATE_API = {{"models": 1, "ops": 1}}, {SEE}'),
        ("SUROGATE_API = 0", "has SUROGATE_API = 0, not a number for each hook. Write "
             f'SUROGATE_API = {{"models": 1, "ops": 1}}, {SEE}'),
        ("SUROGATE_API = {'ops': '1'}", "has SUROGATE_API = {'ops': '1'}, not a number for each hook. Write "
             f'SUROGATE_API = {{"models": 1, "ops": 1}}, {SEE}'),
        ("SUROGATE_API = {'ops': 0}", "has SUROGATE_API = {'ops': 0}, not a number for each hook. Write "
             f'SUROGATE_API = {{"models": 1, "ops": 1}}, {SEE}'),
        ("SUROGATE_API = {'ops': 1}", "has no number for models in SUROGATE_API. Write "
             f'SUROGATE_API = {{"ops": 1, "models": 1}}, {SEE}'),
        ("SUROGATE_API = {'ops': 1, 'modls': 1}", "has a number for 'modls' in SUROGATE_API, which is no hook; did you "
                                                  "mean models?"),
        ("SUROGATE_API = {'ops': 4, 'models': 1}", "is written for version 4 of surogate_ops, surogate-core "
             f"{__version__} serves 2 to 3. {PAGE} of a newer release says what changed. "
             "Try: pip install -U surogate-core"),
        ("SUROGATE_API = {'ops': 1, 'models': 1}", "is written for version 1 of surogate_ops, surogate-core "
             f"{__version__} serves 2 to 3. Changed in 2: flops is cost; 3: infer has one ({PAGE}). "
             "Try: pip install -U acme-old"),
    ],
)  # fmt: skip
def test_a_plugin_for_another_version_of_a_hook_says_what_changed_and_what_to_do(
    install: Install, monkeypatch: pytest.MonkeyPatch, states: str, reason: str
) -> None:
    if states.startswith(("SUROGATE_API = {'ops': 4", "SUROGATE_API = {'ops': 1, 'models'")):
        changes = {2: "flops is cost", 3: "infer has one"}
        monkeypatch.setattr(versions, "SERVED", {**versions.SERVED, "ops": versions.Served(2, 3, changes)})
    install("acme-old", "0.9", "old", f"{textwrap.dedent(OPS)}{states}", head="")
    registry = load_registry()
    assert outcome(registry, "old").state is State.WRONG_API
    assert outcome(registry, "old").reason == f"acme_old_old {reason}"
    assert "\n" not in reason


@pytest.mark.parametrize("source", ["from surogate_core.api import API", "import surogate.world.members"])
def test_a_plugin_that_imports_what_has_gone_from_core_is_told_the_page_that_names_it(
    install: Install, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    install("acme-old", "0.9", "old", source, head="")
    told = f". {PAGE} says what changed in surogate-core"
    assert told not in outcome(load_registry(), "old").reason, "the page has no change"
    changes = {2: "API is gone, and surogate.world.members is surogate_core.api.members"}
    monkeypatch.setitem(versions.SERVED, "ops", versions.Served(1, 2, changes))
    install("acme-older", "0.9", "older", source, head="")
    assert outcome(load_registry(), "older").reason.endswith(f"acme_older_older.py:1){told}")


@pytest.mark.parametrize("number", [2, 3])
def test_core_serves_every_version_in_its_range(install: Install, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(versions, "SERVED", {**versions.SERVED, "ops": versions.Served(2, 3, {})})
    install("acme-new", "1.0", "new", f"{textwrap.dedent(OPS)}SUROGATE_API = {{'ops': {number}, 'models': 1}}", head="")
    assert outcome(load_registry(), "new").state is State.LOADED


def test_every_hook_has_a_version_and_every_later_one_says_what_changed() -> None:
    assert {f"surogate_{hook}" for hook in SERVED} == {*HOOKS, "surogate_diagnose"}
    for served in SERVED.values():
        assert 1 <= served.oldest <= served.newest
        assert set(served.changes) == set(range(2, served.newest + 1)) and all(served.changes.values())


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
            "failed in surogate_optimizers(): KeyError: 'key' ({folder}/surogate_recipe_x_x.py:{last})",
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
def test_a_wrong_hook_names_plugin_version_and_hook(install: Install, tmp_path: Path, source: str, reason: str) -> None:
    last = len(DEFINITIONS.splitlines()) + len(source.splitlines())
    reason = reason.replace("{folder}", tmp_path.name).replace("{last}", str(last))
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
