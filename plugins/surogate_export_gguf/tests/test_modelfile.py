"""The Modelfile says the turns of the chat template, or that it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving.contexts import context_of
from serving.tiny_models import TEMPLATES, write_model
from transformers import PreTrainedTokenizerFast

from surogate_export_gguf import plugin, turns


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Llama."""
    return write_model("llama3", tmp_path_factory.mktemp("models") / "llama3")


def renders(folder: Path, template: str) -> Callable[[Sequence[turns.Message]], str]:
    """Return what renders a template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template

    def render(messages: Sequence[turns.Message]) -> str:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))

    return render


PLAIN = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@pytest.mark.parametrize("name", PLAIN)
def test_turns_render_as_the_template_does(folder: Path, name: str) -> None:
    render = renders(folder, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    found = turns.turns_of(render)
    assert found is not None
    talk = [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 4, "abcdefg", strict=False)]
    assert found.render(talk) == render(talk)
    if found.system:
        asked = [{"role": "system", "content": "Be brief."}, *talk]
        assert found.render(asked) == render(asked)


def test_known_turns(folder: Path) -> None:
    chatml = turns.turns_of(renders(folder, (TEMPLATES / "openhermes.jinja").read_text()))
    answer = "<|im_end|>\n<|im_start|>assistant\n"
    assert chatml == turns.Turns(
        "<|im_start|>user\n",
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n"),
        answer,
        "<|im_end|>\n<|im_start|>user\n",
        answer,
    )


OTHER = [
    "{{ messages | length }}",
    "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.content }};{% endfor %}",
    "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}",
    "{{ raise_exception('no') }}",
]


@pytest.mark.parametrize("template", OTHER)
def test_other_templates_are_no_turns(folder: Path, template: str) -> None:
    assert turns.turns_of(renders(folder, template)) is None


def written(folder: Path, to: Path, template: str) -> tuple[str, list[str], list[Path]]:
    """Return the Modelfile of a model with a template, the notices and the files."""
    notices: list[str] = []
    source = to / "source"
    source.mkdir()
    for path in folder.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "chat_template.jinja").write_text(template)
    out = to / "out"
    out.mkdir()
    plugin.GGUF.write(context_of(source, "q8_0", notices.append, name="mine"), out)
    return (out / "Modelfile").read_text(), notices, sorted(out.iterdir())


def test_a_modelfile_has_the_file_the_turns_and_the_ends(folder: Path, tmp_path: Path) -> None:
    text, notices, files = written(folder, tmp_path, (TEMPLATES / "llama-3.jinja").read_text())
    assert [path.name for path in files] == ["Modelfile", "mine-q8_0.gguf"]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    answer = "<|eot_id|>" + header.format("assistant")
    system = "{{ if .System }}" + header.format("system") + "{{ .System }}<|eot_id|>" + header.format("user")
    assert text == (
        'FROM ./mine-q8_0.gguf\nTEMPLATE """'
        + system
        + "{{ else }}"
        + header.format("user")
        + "{{ end }}{{ range $i, $_ := .Messages }}"
        + '{{ if eq .Role "user" }}{{ .Content }}'
        + answer
        + '{{ else if eq .Role "assistant" }}{{ .Content }}<|eot_id|>'
        + header.format("user")
        + '{{ end }}{{ end }}"""\nPARAMETER stop "<|eot_id|>"\n'
    )  # without <|begin_of_text|>, which llama.cpp adds
    assert not any("Modelfile" in line for line in notices)


NOTICES: list[tuple[str, str]] = [
    ("{{ messages | length }}", "not made of plain turns, so Ollama chooses one"),
    ("{% for m in messages %}{{ '{{x}}' + m.content }}{% endfor %}", "not made of plain turns"),
    ((TEMPLATES / "mistral-v3.jinja").read_text(), "has no system message at its start"),
    ("{% for m in messages %}{{ strftime_now('%d') + m.content }}{% endfor %}", "stays that of the export in Ollama"),
]


@pytest.mark.parametrize(("template", "line"), NOTICES, ids=["length", "braces", "mistral", "date"])
def test_what_a_modelfile_cannot_say_is_a_notice(folder: Path, tmp_path: Path, template: str, line: str) -> None:
    _, notices, _ = written(folder, tmp_path, template)
    assert any("Modelfile" in notice and line in notice for notice in notices)


def test_a_model_without_a_template_has_none(folder: Path, tmp_path: Path) -> None:
    source: Any = tmp_path / "source"
    source.mkdir()
    for path in folder.iterdir():
        if path.name != "chat_template.jinja":
            (source / path.name).write_bytes(path.read_bytes())
    out = tmp_path / "out"
    out.mkdir()
    plugin.GGUF.write(context_of(source, "bf16", name="mine"), out)
    assert (out / "Modelfile").read_text() == 'FROM ./mine-bf16.gguf\nPARAMETER stop "<|eot_id|>"\n'
