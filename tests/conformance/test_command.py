"""`surogate plugins test`: what it takes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from surogate.cli.app import app

FORMAT = """
from surogate_core.api import DatasetFormatDef, Encoded, NoOptions, provides

SUROGATE_API = {"dataset_formats": 1}
surogate_dataset_formats = provides([DatasetFormatDef(
    name="acme", summary="", options=NoOptions, matches=lambda columns: False, fields=lambda options: ["acme"],
    encode=lambda row, tokenizer, options: Encoded([1, 2], [True, True]))])
"""


def outcome(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["plugins", "test", *map(str, args)])


def test_a_file_is_tested_and_one_document_printed(tmp_path: Path) -> None:
    (tmp_path / "acme_file.py").write_text(FORMAT)
    done = outcome(tmp_path / "acme_file.py", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["passed"] and {r["what"] for r in document["results"]} == {"package acme_file", "format acme"}
    assert document["results"][0].keys() == {"what", "sentence", "state", "reason", "remedy", "warnings"}


def test_a_folder_need_not_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src/acme_folder").mkdir(parents=True)
    (tmp_path / "src/acme_folder/__init__.py").write_text("")
    (tmp_path / "src/acme_folder/plugin.py").write_text(FORMAT + "from surogate.data import pack  # not public\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "acme-folder"\nversion = "1.0"\ndependencies = ["surogate-core==0.1.0"]\n'
        '[project.entry-points.surogate]\nacme = "acme_folder.plugin"\n'
    )
    done = outcome(tmp_path)
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert any("it requires surogate-core==0.1.0, one version, which excludes all later ones" in line for line in lines)
    assert '            Add to its dependencies: "surogate-core>=0.2,<0.3".' in lines
    assert any("imports surogate.data, which is not public and may move" in line for line in lines)
    assert lines[-1] == "10 passed, 1 failed, 0 not applicable; 2 warnings"
    named_alike = tmp_path.rename(tmp_path.parent / "acme-folder")
    monkeypatch.chdir(named_alike.parent)
    assert outcome("acme-folder").output.splitlines()[-1] == lines[-1], "a folder with the name of its package"
    monkeypatch.chdir("/")
    gone = outcome("acme-folder")
    assert gone.exit_code == 2, "it is known only while it is tested"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["acme-nowhere"], "acme-nowhere: is no installed distribution or plugin, no folder and no .py file"),
        (["."], "has no pyproject.toml"),
        (["nothing.py"], "nothing.py: there is no such file"),
        (["empty.py"], "empty.py: has no hooks"),
        (["adamw", "--device", "h999"], "h999"),
    ],
)
def test_what_is_no_plugin_is_refused(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.py").write_text("x = 1\n")
    done = outcome(*args)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.output


def test_an_error_in_the_syntax_of_a_file_is_a_failed_check(tmp_path: Path) -> None:
    (tmp_path / "acme_open.py").write_text(FORMAT + "\nopened = (\n")
    done = outcome(tmp_path / "acme_open.py")
    line = len(FORMAT.splitlines()) + 2
    assert done.exit_code == 1
    reason = f"SyntaxError: '(' was never closed (acme_open.py, line {line})"
    assert f"its plugins load: plugin acme_open is broken: import of acme_open failed: {reason}" in done.output
