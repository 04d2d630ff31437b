"""The directory of plugins lists the packages of this repository, with what they provide."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator

import pytest
from plugin_directory import COMMAND, PAGE, ROOT, Entry, entries, page

from surogate.cli.external import all_commands
from surogate.config.keys import DISTRIBUTIONS, NOT_YET_NAMES, PACKAGES
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.hookspecs import KINDS
from surogate_core.plugins.provided import CORE
from surogate_core.words import fold

EXAMPLE = ROOT / "plugins/example_third_party"
GROUPS = {"surogate", "surogate.commands"}


def packages() -> Iterator[str]:
    """Yield the distributions of this repository that plug into core."""
    for path in (*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        if GROUPS & project.get("entry-points", {}).keys() and path.parent != EXAMPLE and project["name"] != CORE:
            yield project["name"]


def test_the_directory_has_every_package_of_this_repository_once() -> None:
    assert sorted(e.distribution for e in entries() if e.folder) == sorted(packages())
    names = [entry.distribution for entry in entries()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.distribution)
def test_an_entry_says_what_its_package_is(entry: Entry) -> None:
    assert all((entry.summary, entry.use, entry.source)) and entry.provides
    assert set(entry.provides) <= {*KINDS, COMMAND} - {"op", "kernel"}
    if entry.folder is None:
        return
    project = tomllib.loads((entry.folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == entry.distribution
    found: dict[str, list[str]] = {}
    for item in load_registry().provided:
        if item.plugin.distribution == entry.distribution and item.kind not in ("op", "kernel"):
            found.setdefault(item.kind, []).append(item.name)
    for command in all_commands():
        if command.distribution == entry.distribution:
            found.setdefault(COMMAND, []).append(command.name)
    assert {kind: sorted(names) for kind, names in entry.provides.items()} == {k: sorted(v) for k, v in found.items()}


def test_without_a_package_its_names_and_keys_say_what_to_install() -> None:
    """Models and forms are found by checkpoints, and offloading by its keys. Core knows subcommands alone."""
    options = load_registry().options_models()
    ours = [(kind, n, e.distribution) for e in entries() if e.folder for kind, some in e.provides.items() for n in some]
    names = {(k, fold(n)): package for k, n, package in ours if k not in ("model", "offload", "checkpoint form")}
    keys = {(key, package) for k, n, package in ours if (k, n) in options for key in options[k, n].model_fields}
    assert {named: package for named, package in DISTRIBUTIONS.items() if named[0] != "model"} == names
    assert keys >= set(PACKAGES.items()) and {key for key, _ in keys} == set(PACKAGES)
    assert not names.keys() & NOT_YET_NAMES.keys()


def test_the_page_is_made_from_the_directory() -> None:
    assert PAGE.read_text() == page(), "python tests/plugin_directory.py > docs/plugins.md"


def test_installed_packages_of_this_repository_are_those_that_are_listed() -> None:
    """Hence the test of what they provide is of all of them."""
    installed = {e.dist.name for g in GROUPS for e in importlib.metadata.entry_points(group=g) if e.dist}
    assert set(packages()) <= installed
