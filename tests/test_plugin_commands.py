"""What plugins show of themselves in `surogate plugins` and `doctor`, and commands of other distributions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_plugins import DEFINITIONS, FIRST_PARTY, Install, installing
from typer.testing import CliRunner

from surogate.cli.app import app
from surogate_core.api import SystemInfo
from surogate_core.plugins.discovery import load_registry


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch, DEFINITIONS)


def test_a_failing_diagnosis_is_a_finding(install: Install) -> None:
    install("acme-doc", "1.0", "doc", "@hookimpl\ndef surogate_diagnose(system):\n    return [1 / 0]")
    system = SystemInfo(python="3.11", platform="x", cpu_count=1, memory_bytes=2**34)
    findings = [finding for plugin, finding in load_registry().diagnose(system) if plugin.name == "doc"]
    assert [finding.level for finding in findings] == ["error"]
    assert findings[0].message.startswith(
        "plugin acme-doc 1.0 failed in surogate_diagnose(): ZeroDivisionError: division by zero ("
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


def test_the_plugins_command_lists_what_a_plugin_imports_that_is_not_public(install: Install) -> None:
    assert "imports surogate_core" not in CliRunner().invoke(app, ["plugins"]).output
    install("acme-deep", "1.0", "deep", "from surogate_core import memory\nimport surogate_core.program.op\n")
    result = CliRunner().invoke(app, ["plugins"])
    assert result.exit_code == 0
    assert (
        "plugin 'deep' of acme-deep 1.0 imports surogate_core.memory, surogate_core.program.op, which may change; "
        "public: surogate_core.api, surogate_core.reference, surogate_core.testing" in " ".join(result.output.split())
    )
    listed = json.loads(CliRunner().invoke(app, ["plugins", "--json"]).output)["plugins"]
    assert {plugin["name"]: plugin["private_imports"] for plugin in listed} == {name: [] for name in FIRST_PARTY} | {
        "deep": ["surogate_core.memory", "surogate_core.program.op"]
    }


def test_the_plugins_command_shows_conflicts_and_fails(install: Install) -> None:
    install("acme-a", "1.0", "a", "@hookimpl\ndef surogate_recipes():\n    return [recipe('bf16')]")
    result = CliRunner().invoke(app, ["plugins"])
    assert result.exit_code == 2
    assert "recipe 'bf16' is provided by acme-a 1.0 and surogate-recipe-bf16 0.2.0" in result.output


def test_a_command_of_another_distribution_is_listed_without_import_and_runs(install: Install) -> None:
    source = "print('imported')\ndef command(name: str) -> int:\n    print('hi', name)\n    return 5"
    install("acme-commands", "1.0", "hello", source, group="surogate.commands", head="")
    helped = CliRunner().invoke(app, ["--help"])
    assert "From acme-commands 1.0." in helped.output
    assert "watch          Show running and finished runs" in helped.output  # the summary of surogate-watch
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
    problems = {command["name"]: command["problem"] for command in listed["commands"]}
    assert problems["doctor"] == "'doctor' is a command of surogate itself and cannot be replaced"
    assert {name for name, problem in problems.items() if not problem} >= {"new", "plugins test", "plugins trace"}


def test_a_command_of_another_distribution_can_follow_plugins(install: Install) -> None:
    source = "def command(name: str) -> int:\n    print('hi', name)\n    return 5"
    install("acme-commands", "1.0", "plugins.greet", source, group="surogate.commands", head="")
    ran = CliRunner().invoke(app, ["plugins", "greet", "world"])
    assert (ran.exit_code, ran.output) == (5, "hi world\n")
    assert CliRunner().invoke(app, ["plugins", "greet", "--help"]).output.startswith("Usage: ")  # plain, as core's
    assert "plugins greet" in CliRunner().invoke(app, ["plugins"]).output


@pytest.mark.parametrize(
    ("command", "package"), {"plugins test": "surogate-conformance", "verify": "surogate-verify"}.items()
)
def test_a_command_that_is_not_installed_names_its_package(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUROGATE_PLUGINS", f"-{package}")
    missing = CliRunner().invoke(app, [*command.split(), "acme"])
    said = f"error: surogate {command}: is not installed. Try: pip install {package}\n"
    assert (missing.exit_code, missing.stderr) == (2, said)


def test_a_broken_command_names_its_distribution(install: Install) -> None:
    install("acme-commands", "1.0", "oops", "import no_such_module", group="surogate.commands", head="")
    result = CliRunner().invoke(app, ["oops"])
    assert result.exit_code == 2
    assert (
        "command 'oops' of acme-commands 1.0 cannot be used: acme_commands_oops:command: ModuleNotFoundError"
        in result.output
    )
