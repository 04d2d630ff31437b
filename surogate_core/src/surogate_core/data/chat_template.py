"""The chat template of a model directory: messages to text, by the engine and the rules of transformers.

Importing transformers' engine takes about a second and imports no torch; it happens with the first rendering.

Templates disagree on the form of a tool call. Most read its arguments as an object, some as JSON text; some write calls
only where the content is none, others only where it is text. `ChatTemplate` renders one call in each form, once, and
uses the first form that the template writes.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..hub.files import TEMPLATE_DIRECTORY

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Characters from the first to after the last."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CUT_TAG = re.compile(r"<[^<>\s]*\Z")
# The engine keeps the spans of a rendering in the compiled template, and rendering holds the interpreter's lock anyway.
_LOCK = threading.Lock()


@dataclass(frozen=True)
class _CallForm:
    """How a message with tool calls is passed to a template.

    null_content: content that says nothing is none, not "". json_arguments: the arguments are JSON text, not an object.
    """

    null_content: bool
    json_arguments: bool

    def of(self, message: Message) -> dict[str, Any]:
        formed = dict(message)
        if not formed.get("tool_calls"):
            return formed
        if not formed.get("content"):
            formed["content"] = None if self.null_content else ""
        if self.json_arguments:
            formed["tool_calls"] = [_with_json_arguments(call) for call in formed["tool_calls"]]
        return formed


_CALL_FORMS = (_CallForm(True, False), _CallForm(False, False), _CallForm(True, True), _CallForm(False, True))
_WORDS = ("some_function", "some_key", "some_value")
_ASKED = {"role": "user", "content": "a"}
_CALLED = {
    "role": "assistant",
    "content": "",
    # Mistral's templates want an id of nine characters.
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": _WORDS[0], "arguments": {_WORDS[1]: _WORDS[2]}}}
    ],
}
_RESULT = {"role": "tool", "content": "b", "tool_call_id": "abcdefghi", "name": _WORDS[0]}
_ANSWER = {"role": "assistant", "content": "c"}


class ChatTemplate:
    """Renders messages. special_tokens: bos_token, eos_token, ... as the template's variables."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], where: str) -> None:
        """`sources`: templates by name; "tool_use" serves rows with tools where there is one, "default" the others."""
        self._sources = sources
        self._special_tokens = special_tokens
        self.where = where
        self._prompts: dict[str, str] = {}
        self._forms: dict[str, _CallForm] = {}

    def marks_generation(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template itself says by `{% generation %}` what the assistant generates."""
        return _GENERATION.search(self._source(tools)) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False) -> str:
        """The text of `messages`; with `prompt`, up to where the next answer begins. ConfigError if it refuses."""
        return self._render(self._formed(messages, tools), tools, add_generation_prompt=prompt)[0]

    def render_spans(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """The text of `messages` and its `{% generation %}` blocks."""
        return self._render(self._formed(messages, tools), tools, return_assistant_tokens_mask=True)

    def generation_prompt(self, tools: Sequence[Any] | None) -> str:
        """What the template adds where an answer is to begin ("<|im_start|>assistant\\n"); empty when nothing."""
        source = self._source(tools)
        if source not in self._prompts:
            without, with_prompt = self.render([_ASKED], tools), self.render([_ASKED], tools, prompt=True)
            # Without a prompt, some templates end the text with eos: the prompt stands in its place.
            pairs = enumerate(zip(without, with_prompt, strict=False))
            same = next((n for n, (one, other) in pairs if one != other), min(len(without), len(with_prompt)))
            cut_tag = _CUT_TAG.search(with_prompt[:same])
            self._prompts[source] = with_prompt[cut_tag.start() if cut_tag else same :]
        return self._prompts[source]

    def _source(self, tools: Sequence[Any] | None) -> str:
        return self._sources["tool_use" if tools and "tool_use" in self._sources else "default"]

    def _formed(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
        if not any(message.get("tool_calls") for message in messages):
            return [dict(message) for message in messages]
        source = self._source(tools)
        if source not in self._forms:
            written = [form for form in _CALL_FORMS if self._writes(form, [_ASKED, _CALLED], tools)]
            # Some templates read a call differently when it is not the last message.
            answered = [form for form in written if self._writes(form, [_ASKED, _CALLED, _RESULT, _ANSWER], tools)]
            self._forms[source] = next(iter(answered or written), _CALL_FORMS[1])
        return [self._forms[source].of(message) for message in messages]

    def _writes(self, form: _CallForm, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Whether the template writes the call of `messages` in this form, and no "None" for content that is none."""
        try:
            text = self._render([form.of(message) for message in messages], tools)[0]
        except ConfigError:
            return False
        return all(word in text for word in _WORDS) and "None" not in text

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, **how: bool
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        settings: dict[str, Any] = {**self._special_tokens, **how}
        try:
            with _LOCK:
                rendered: Any = render_jinja_template(
                    [list(messages)],
                    tools=list(tools) if tools else None,
                    chat_template=self._source(tools),
                    **settings,
                )
        except Exception as error:  # what the template raises, and whatever Jinja raises when it runs
            raise ConfigError(f"{self.where} refuses these messages: {type(error).__name__}: {error}") from error
        texts, spans = rendered
        return texts[0], [(int(start), int(stop)) for start, stop in spans[0]] if spans else []


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def read_chat_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The model's templates, found as transformers finds them; None: there is none.

    The files chat_template.jinja and additional_chat_templates/NAME.jinja, or, without either, the entry of
    tokenizer_config.json (`settings`): a text, or a list of named ones. Raises ConfigError naming the file when it
    holds no template, and when there are named ones but none that serves every conversation.
    """
    files = {"default": directory / "chat_template.jinja"} if (directory / "chat_template.jinja").is_file() else {}
    files |= {path.stem: path for path in sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    if files:
        texts = {name: _read_text(path) for name, path in files.items()}
        path = files.get("default", directory / TEMPLATE_DIRECTORY)
    else:
        path = directory / "tokenizer_config.json"
        written: Any = settings.get("chat_template")
        if written is None:
            return None
        texts = _named_texts(written, path)
    if "default" not in texts:
        raise ConfigError(
            f"{path}: the templates are named {', '.join(texts)}, and none of them default. Add chat_template.jinja: "
            "conversations without tools need it."
        )
    return ChatTemplate(texts, _special_tokens(settings), f"chat template ({path})")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8: {error}. Fetch it again.") from error


def _named_texts(written: Any, path: Path) -> dict[str, str]:
    """Templates by name, of the entry of tokenizer_config.json."""
    if isinstance(written, list) and all(isinstance(entry, dict) for entry in written):
        sources = {str(entry.get("name")): entry.get("template") for entry in written}
    else:
        sources = {"default": written}
    if not isinstance(sources.get("default"), str):
        raise ConfigError(
            f"{path}: chat_template is {json.dumps(written)[:60]}, not the text of a template, nor a list with one "
            "named default. Take the file from the model's repository."
        )
    return {name: text for name, text in sources.items() if isinstance(text, str)}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of bos_token, eos_token and the like."""
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
