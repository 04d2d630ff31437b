"""Runs the commands and code of the documentation and compares its quotations, so that it stays true.

`make docs-test` runs this file; `make test` does not, because it needs pip.

A comment on the line before a fenced block says how to test it. Readers do not see the comment:

    <!-- test: file acme/plugin.py -->    write the block to this file
    <!-- test: run -->                    run it (`bash` or `python`); it must succeed
    <!-- test: run, exit 2 -->            run it; it must exit with code 2
    <!-- test: output -->                 the block must occur in the output of the last block that ran
    <!-- test: quote train/loop.py -->    the block must occur, line by line, in this file of the repository

A comment without a block is a command of bash that runs there, for what a reader has already:

    <!-- test: setup mkdir model -->

The blocks of a document share a new directory with a link to `examples/`, and a new virtual environment with
everything that `make install` installs. A block may `pip install` more. Blocks without a comment are not run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import virtualenvs
import yaml
from forked_modules import Server
from page_blocks import blocks
from test_layers import HOUSES
from typer.testing import CliRunner

from surogate.cli.app import app
from surogate.cli.external import CORE_COMMANDS, external_commands
from surogate_core.plugins.hookspecs import SPECS

ROOT = Path(__file__).parents[2]
CORE = ROOT / "surogate_core/src/surogate_core"
EXAMPLE = ROOT / "plugins/example_third_party"
WRITE_A_PLUGIN = ROOT / "docs/write-a-plugin.md"
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "tests/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
SOURCE_FOLDERS = [
    ROOT,
    CORE,
    ROOT / "src/surogate",
    *ROOT.glob("*/src/*"),
    *ROOT.glob("plugins/*/src/*"),
    *ROOT.glob("surogate_recipes_*"),
]

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)]*))?\)")
_HEADING = re.compile(r"^#+ (?P<text>.*)$", re.M)
_SOURCE = re.compile(r"`(?P<path>[a-z_]+/[\w/.]*\.(?:py|cu|cmake|sh|h))`")
_COMMAND = re.compile(r"(?:^|`|\$ )surogate (?P<verb>[a-z]+(?:-[a-z]+)*)(?P<rest>[^`\n]*)", re.M)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documents_with(*todos: str) -> list[Path]:
    return [path for path in DOCUMENTS if any(block.todo in todos for block in blocks(path))]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    forking = Server(tmp_path_factory.mktemp("server"))
    yield forking
    forking.close()


@pytest.mark.parametrize("document", documents_with("run", "file", "output"), ids=name)
def test_the_blocks_of_a_document_run(
    document: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = virtualenvs.create(tmp_path / "venv", on_top_of=virtualenvs.current_site_packages())
    server.install(environment)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")

    printed = ""
    for block in blocks(document):
        if block.todo == "file":
            path = work / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.todo == "run":
            shell = ("bash", "-euo", "pipefail", "-c") if block.language == "bash" else ("python", "-c")
            result = environment.run(*shell, block.text, cwd=work, code=block.code)
            printed = result.stdout + result.stderr
        elif block.todo == "output":
            assert block.text.strip() in printed, f"{name(document)}:{block.line}: not printed; printed was\n{printed}"


@pytest.mark.parametrize("document", documents_with("quote"), ids=name)
def test_quoted_source_occurs_in_its_file(document: Path) -> None:
    for block in blocks(document):
        if block.todo == "quote":
            source = (ROOT / block.file).read_text()
            assert f"\n{block.text}" in f"\n{source}", (
                f"{name(document)}:{block.line}: not in {block.file}:\n{block.text}"
            )


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_source_files_that_a_document_names_exist(document: Path) -> None:
    """Paths are relative to the document, the repository or a package; "..." stands for any folders."""
    named = {match["path"].replace("/.../", "/**/") for match in _SOURCE.finditer(document.read_text())}
    folders = [document.parent, *SOURCE_FOLDERS]
    missing = [path for path in sorted(named) if not any(any(folder.glob(path)) for folder in folders)]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_local_links_of_a_document_exist(document: Path) -> None:
    missing = []
    for match in _LINK.finditer(document.read_text()):
        if "://" in match["target"] or match["target"].startswith("mailto:"):
            continue
        path = document.parent / match["target"] if match["target"] else document
        if not path.exists() or (match["anchor"] and match["anchor"] not in anchors(path)):
            missing.append(match[0])
    assert not missing


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = (match["text"].lower() for match in _HEADING.finditer(document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_yaml_of_a_document_is_yaml(document: Path) -> None:
    for block in blocks(document):
        if block.language == "yaml":
            yaml.safe_load(block.text)


@pytest.fixture(scope="session")
def options() -> dict[str, set[str]]:
    """Options of each verb, as its help lists them."""
    found = {}
    for verb in (*CORE_COMMANDS, *external_commands()):
        text = CliRunner().invoke(app, [*verb.split(), "--help"]).stdout
        found[verb] = set(re.findall(r"--[a-z][a-z-]*", text))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_commands_of_a_document_exist(document: Path, options: dict[str, set[str]]) -> None:
    wrong = []
    for match in _COMMAND.finditer(document.read_text()):
        verb, rest = match["verb"], match["rest"]
        if (longer := " ".join((verb, *rest.split()[:1]))) in options:
            verb = longer
        if verb not in options:
            wrong.append(f"surogate {verb}: no such verb")
            continue
        given = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))
        wrong += [f"surogate {verb} {option}: no such option" for option in sorted(given - options[verb])]
    assert not wrong


@pytest.mark.parametrize(("place", "house"), [*enumerate(HOUSES)], ids=HOUSES)
def test_the_parts_of_a_house_are_in_a_table_for_contributors_from_the_bottom_up(place: int, house: str) -> None:
    tables = (ROOT / "CONTRIBUTING.md").read_text().split("| part | what |\n|---|---|\n")[1:]
    listed = re.findall(r"^\| `(\w+)` \|", tables[place].partition("\n\n")[0], re.M)
    places, (_, parts) = {part: place for place, part in enumerate(listed)}, HOUSES[house]
    assert set(listed) == {part for part in parts if not part.startswith("__")}
    upward = [(part, below) for part in listed for below in parts[part] if places[below] > places[part]]
    assert not upward


def test_every_hook_is_in_the_authors_guide() -> None:
    text = WRITE_A_PLUGIN.read_text()
    hooks = {f"{hook}({', '.join(inspect.signature(function).parameters)})" for hook, function in vars(SPECS).items()}
    assert hooks
    assert not [hook for hook in sorted(hooks) if f"`{hook}`" not in text]


def test_the_guides_plugin_is_the_example_in_the_repository() -> None:
    written = {Path(b.file): b.text for b in blocks(WRITE_A_PLUGIN) if b.file.startswith("acme-surogate-sgd/")}
    relative = {file.relative_to("acme-surogate-sgd"): text for file, text in written.items()}
    ours = {
        path.relative_to(EXAMPLE): path.read_text()
        for path in EXAMPLE.rglob("*")
        if path.is_file() and path.suffix in (".py", ".toml") and "__pycache__" not in path.parts
    }
    assert relative == ours
