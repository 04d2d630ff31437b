"""An editor with a YAML language server: what it marks, proposes and explains by the schema of `surogate schema`.

`make docs-test` runs this file. It installs `yaml-language-server` by npm, so it is skipped without npm.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SERVER = "yaml-language-server@1.25.0"
FIRST_LINE = "# yaml-language-server: $schema=./surogate.schema.json\n"

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="yaml-language-server is installed by npm")


class Editor:
    """A client of a language server."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen([program, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._calls = self._opened = 0
        self._call("initialize", {"processId": None, "rootUri": folder.as_uri(), "capabilities": {}})
        self._send({"method": "initialized", "params": {}})
        settings = {"yaml": {"validate": True, "completion": True, "hover": True}}
        self._send({"method": "workspace/didChangeConfiguration", "params": {"settings": settings}})

    def open(self, text: str) -> tuple[dict[str, str], list[str]]:
        """Open a file. Return its document, and the messages that mark it."""
        self._opened += 1
        document = {"uri": (self._folder / f"run{self._opened}.yaml").as_uri()}
        opened = {**document, "languageId": "yaml", "version": 1, "text": FIRST_LINE + text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": opened}})
        found = next(m["params"] for m in self._messages() if m.get("method") == "textDocument/publishDiagnostics")
        assert found["uri"] == document["uri"]
        return document, [item["message"] for item in found["diagnostics"]]

    def ask(self, method: str, document: dict[str, str], line: int, character: int) -> Any:
        """Ask about a place; lines count from 0, below the line that names the schema."""
        position = {"line": line + 1, "character": character}
        return self._call(f"textDocument/{method}", {"textDocument": document, "position": position})

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _call(self, method: str, params: Any) -> Any:
        self._calls += 1
        call = self._calls
        self._send({"id": call, "method": method, "params": params})
        return next(m["result"] for m in self._messages() if m.get("id") == call and "method" not in m)

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        while True:
            header = self._process.stdout.readline()
            assert header, "the server has ended"
            self._process.stdout.readline()
            message = json.loads(self._process.stdout.read(int(header.split(b":")[1])))
            if "method" in message and "id" in message:  # a question of the server, such as for settings
                asked = message["params"].get("items", []) if isinstance(message.get("params"), dict) else []
                self._send({"id": message["id"], "result": [None] * len(asked) if asked else None})
            yield message


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    folder = tmp_path_factory.mktemp("editor")
    subprocess.run(["npm", "install", "--silent", "--prefix", folder, SERVER], check=True)
    program = Path(sys.prefix) / "bin/surogate"
    schema = subprocess.run([program, "schema"], check=True, stdout=subprocess.PIPE).stdout
    (folder / "surogate.schema.json").write_bytes(schema)
    opened = Editor(folder / "node_modules/.bin/yaml-language-server", folder)
    yield opened
    opened.close()


def test_a_right_config_is_not_marked(editor: Editor) -> None:
    text = "model: m\nlearning_rate: 2e-4\nlora: true\nrecipe: fp8_hybrid\ndatasets:\n  - {path: a.txt, type: text}\n"
    assert editor.open(text)[1] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rat: 1", "Property learning_rat is not allowed."),
        ("lora_rank: 0", "Value is below the minimum of 1."),
        ("recipe: fp9", 'Value is not accepted. Valid values: "bf16", "fp8-hybrid", "nvfp4"'),
        ("early_stop: true", "not yet: adaptive training is not built"),
        ("datasets: [{path: a.txt, type: text, messages_field: x}]", '"text_field", "sample_by"'),
    ],
)
def test_a_wrong_line_is_marked(line: str, message: str, editor: Editor) -> None:
    messages = editor.open(f"model: m\n{line}\n")[1]
    assert any(message in found for found in messages), messages


def test_keys_are_proposed_and_explained(editor: Editor) -> None:
    document, _ = editor.open("model: m\nrecompute: auto\nlora_a\n")
    labels = {item["label"] for item in editor.ask("completion", document, 2, 6)["items"]}
    assert {"lora_alpha", "lora_alpha_pattern", "learning_rate"} <= labels
    assert not labels & {"early_stop", "min_lr_ratio", "recompute_attention"}  # known, but not served
    assert "cheapest that makes it fit" in json.dumps(editor.ask("hover", document, 1, 3))


def test_values_are_proposed(editor: Editor) -> None:
    document, _ = editor.open("model: m\nrecipe: \n")
    labels = {item["label"] for item in editor.ask("completion", document, 1, 8)["items"]}
    assert {"bf16", "fp8-hybrid", "nvfp4"} <= labels
