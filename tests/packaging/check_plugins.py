"""Every plugin of the directory, docs/plugins.toml, by itself: installed into a new environment and tested there by
`surogate plugins test`.

`make test-plugins` runs this file after `make wheels`; `make test` does not, because it takes minutes. One plugin:
`-k surogate-lora`.

Packages of this repository are installed from `dist/` without an index, on top of the packages of others that the
environment of the tests has. Packages of others are installed from the index.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import virtualenvs
from plugin_directory import ROOT, Entry, entries

DIST = ROOT / "dist"


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to what is installed here, without the packages of this repository."""
    folder = tmp_path_factory.mktemp("others")
    for path in virtualenvs.current_site_packages().iterdir():
        if "surogate" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.distribution)
def test_a_plugin_is_installed_by_itself_and_passes(entry: Entry, others: Path, tmp_path: Path) -> None:
    environment = virtualenvs.create(tmp_path / "venv", on_top_of=others)
    index = ["--no-index"] if entry.folder else []
    environment.pip("install", "--quiet", *index, "--find-links", DIST, entry.distribution, "surogate-conformance")
    environment.pip("check")
    if not entry.is_plugin:
        for command in entry.provides["command"]:
            environment.run("surogate", *command.split(), "--help")
        return
    tested = environment.run("surogate", "plugins", "test", entry.distribution, "--json", cwd=tmp_path)
    results = json.loads(tested.stdout)["results"]
    assert [r for r in results if r["state"] == "failed"] == [] and any(r["state"] == "passed" for r in results)
