"""Calls in answers are read in the form in which a chat template writes them, whichever that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_formats import PUBLISHED, chat_tokenizer, published_tokenizer

from surogate.data.tokenizer import Tokenizer
from surogate.generation.calls import Call, CallForm, call_form, message_of, shared_start

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]
ASKED = [{"role": "user", "content": "a"}]
CALLS = [Call("weather", {"city": "Oslo } {", "days": 3}), Call("time.now", {"zone": "CET"})]

XML = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for key, value in c.function.arguments.items() %}{{- '<parameter=' + key + '>\n' ~ value ~ '\n</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

WRITES_CALLS = {
    "mistral-v3": 2,  # calls of an answer; those of llama-3.1 have one
    "mistral-v3-tekken": 2,
    "mistral-small-3.2": 2,
    "qwen2.5": 2,
    "qwen3": 2,
    "llama-3.1": 1,
    "deepseek-r1-distill": 1,
}


def form_of(tokenizer: Tokenizer) -> CallForm | None:
    template = tokenizer.chat_template
    assert template is not None
    return call_form(template, TOOLS)


def answer_of(tokenizer: Tokenizer, calls: Sequence[Call]) -> str:
    """Return what the template writes of an answer with calls: what a model is trained to write."""
    template = tokenizer.chat_template
    assert template is not None
    whole = template.render([*ASKED, message_of("", calls)], TOOLS)
    shared = shared_start(whole, template.render(ASKED, TOOLS, True))
    return whole[len(shared) - shared.endswith("<") :]


@pytest.mark.parametrize("name", WRITES_CALLS)
def test_what_a_published_template_writes_is_read_back(tmp_path: Path, name: str) -> None:
    tokenizer = published_tokenizer(tmp_path / "tokenizer", name)
    form, calls = form_of(tokenizer), CALLS[: WRITES_CALLS[name]]
    assert form is not None
    assert form.read(answer_of(tokenizer, calls))[1] == calls
    assert form.read("It rains in Oslo.") == ("It rains in Oslo.", [])


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - WRITES_CALLS.keys() - {"gpt-oss", "qwq"}))
def test_a_template_without_calls_has_no_form(tmp_path: Path, name: str) -> None:
    assert form_of(published_tokenizer(tmp_path / "tokenizer", name)) is None


def test_arguments_between_words_are_read(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", XML)
    form = form_of(tokenizer)
    assert form is not None and form.marker == "<tool_call>\n<function="
    content, calls = form.read(f"Let me see.\n{answer_of(tokenizer, CALLS)}")
    assert content == "Let me see." and calls == CALLS


def test_text_in_front_of_a_call_is_shown_and_the_call_is_not() -> None:
    form = CallForm("<tool_call>", lambda text, at: None)
    text = "I look: a <b> <tool_call>{}"
    shown = [form.shown(text[:size]) for size in range(len(text) + 1)]
    assert shown == sorted(shown) and max(shown) == text.index("<tool_call>")
    assert form.shown("a <tool") == 2 and form.shown("a <tools") == len("a <tools")
    assert CallForm("", lambda text, at: None).shown('{"name') == 0


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "w", "arguments": ',
        '<tool_call>\n{"name": 3, "arguments": {}}',
        '<tool_call>\n{"name": "w", "arguments": [1]}',
        "<tool_call>",
        "<tool_call>\n" + "[" * 100_000,
    ],
)
def test_what_is_no_whole_call_stays_text(tmp_path: Path, text: str) -> None:
    form = form_of(published_tokenizer(tmp_path / "tokenizer", "qwen3"))
    assert form is not None
    assert form.read(text) == (text, [])


def test_a_call_is_shown_as_one(tmp_path: Path) -> None:
    call: Any = Call("weather", {"city": "Tromsø", "days": [1, 2]})
    assert str(call) == 'weather(city="Tromsø", days=[1, 2])'
