"""The chat template of a model directory: renders messages to text, with the engine and the rules of transformers.

The engine is imported on the first rendering. That takes about a second and does not import torch.

Templates expect tool calls in different forms. Most read the arguments as an object, some as JSON text; some write
calls only if the content is None, others only if it is text. `ChatTemplate` renders a test call in each form once, and
uses the first form that the template writes.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from surogate_core.errors import ConfigError

from ...hub.files import TEMPLATE_DIRECTORY
from .fixed_date import NAME, DayOfRendering, asks_for_date
from .render_budget import Budget, Overrun

Message = Mapping[str, Any]
Span = tuple[int, int]
"""(start, stop) of a range of characters; stop is exclusive."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SET_BY_RENDERING = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("conversations", "chat_template", "return_assistant_tokens_mask", NAME),
)
_LONGEST = 1000
"""Characters of a template's own message that are shown."""
_CUT_TAG = re.compile(r"<[^<>\s]*\Z")
# The engine stores the spans of a rendering in the shared compiled template. Rendering holds the GIL, so the lock costs
# nothing.
_LOCK = threading.Lock()
_BUDGET, _DAY = Budget(), DayOfRendering()
_THREAD = threading.local()


class RenderEnded(ConfigError):
    """A rendering was ended because it cost too much. Another row would end the same way: nothing goes on after it."""


@dataclass(frozen=True)
class _CallForm:
    """A form in which a message with tool calls is passed to a template.

    null_content: empty content is None, not "". json_arguments: the arguments are JSON text, not an object.
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
    # Mistral's templates require an id of nine characters.
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": _WORDS[0], "arguments": {_WORDS[1]: _WORDS[2]}}}
    ],
}
_RESULT = {"role": "tool", "content": "b", "tool_call_id": "abcdefghi", "name": _WORDS[0]}
_ANSWER = {"role": "assistant", "content": "c"}


def end_renderings_with(event: threading.Event | None) -> None:
    """End renderings of this thread once `event` is set: nobody waits for them any more. None: not."""
    _THREAD.ended = event


@functools.cache
def _renderer() -> Callable[..., Any]:
    from .bounded_engine import bounded_renderer

    return bounded_renderer(_BUDGET, _DAY)


class ChatTemplate:
    """Renders messages. `where` names the template in errors."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        where: str,
        variables: Mapping[str, Any] = MappingProxyType({}),
        day: date | None = None,
    ) -> None:
        """
        sources: templates by name; "tool_use", if present, renders rows with tools, "default" all others.
        special_tokens: variables of the template: bos_token, eos_token, ... variables: further ones, of a dataset.
        day: the date that templates write which ask for one; None: that of the rendering.
        """
        self._day = day
        self._sources = sources
        self._special_tokens = special_tokens
        self._variables = variables
        self.where = where
        self._with: dict[str, ChatTemplate] = {}
        self._prompts: dict[str, str] = {}
        self._forms: dict[str, _CallForm] = {}

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return this template with values of its variables, such as {"enable_thinking": False}.

        Raises ConfigError for a name that no template reads, or that rendering itself sets.
        """
        if not variables:
            return self
        key = json.dumps(variables, sort_keys=True)
        if key not in self._with:
            for name in variables:
                self._refuse_unread(name)
            self._with[key] = ChatTemplate(self._sources, self._special_tokens, self.where, variables, self._day)
        return self._with[key]

    def _refuse_unread(self, name: str) -> None:
        if name in _SET_BY_RENDERING or name in self._special_tokens:
            raise ConfigError(f"chat_template_kwargs: {name}: is set by the rows and the tokenizer. Remove it.")
        if not any(re.search(rf"\b{re.escape(name)}\b", source) for source in self._sources.values()):
            raise ConfigError(
                f"chat_template_kwargs: {name}: {self.where} reads no such variable. Remove it, or correct its name."
            )

    @property
    def asks_for_date(self) -> bool:
        """Whether a template may write the date of its rendering."""
        return any(map(asks_for_date, self._sources.values()))

    def marks_generation(self, tools: Sequence[Any] | None) -> bool:
        return _GENERATION.search(self._source(tools)) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False) -> str:
        """Render `messages`; with `prompt`, followed by the start of the next answer.

        Raises ConfigError if the template refuses the messages.
        """
        return self._render(self._formed(messages, tools), tools, add_generation_prompt=prompt)[0]

    def render_spans(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """Render `messages`; return the text and the spans of its `{% generation %}` blocks."""
        return self._render(self._formed(messages, tools), tools, return_assistant_tokens_mask=True)

    def generation_prompt(self, tools: Sequence[Any] | None) -> str:
        """Return what the template writes before an answer ("<|im_start|>assistant\\n"); empty if nothing."""
        source = self._source(tools)
        if source not in self._prompts:
            without, with_prompt = self.render([_ASKED], tools), self.render([_ASKED], tools, prompt=True)
            # Without a prompt, some templates end the text with eos; with one, the prompt is in that place.
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
            # Some templates read a call differently if it is not the last message.
            answered = [form for form in written if self._writes(form, [_ASKED, _CALLED, _RESULT, _ANSWER], tools)]
            self._forms[source] = next(iter(answered or written), _CALL_FORMS[1])
        return [self._forms[source].of(message) for message in messages]

    def _writes(self, form: _CallForm, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Return whether the template writes the call of `messages` in this form, and does not write "None"."""
        try:
            text = self._render([form.of(message) for message in messages], tools)[0]
        except RenderEnded:
            raise
        except ConfigError:
            return False
        return all(word in text for word in _WORDS) and "None" not in text

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, **how: bool
    ) -> tuple[str, list[Span]]:
        settings: dict[str, Any] = {**self._special_tokens, **self._variables, **how}
        try:
            with _LOCK:
                _BUDGET.start((messages, tools), getattr(_THREAD, "ended", None))
                _DAY.day = self._day
                rendered: Any = _renderer()(
                    [list(messages)],
                    tools=list(tools) if tools else None,
                    chat_template=self._source(tools),
                    **settings,
                )
        except Overrun as error:
            raise RenderEnded(
                f"{self.where}: rendering was ended: {error}. Put another chat_template.jinja into the model's folder, "
                "or remove the row."
            ) from error
        except Exception as error:  # raised by the template itself, or any exception of Jinja
            raise ConfigError(
                f"{self.where} refuses these messages: {type(error).__name__}: {str(error)[:_LONGEST]}. "
                "Remove such rows, or use another template."
            ) from error
        texts, spans = rendered
        return texts[0], [(int(start), int(stop)) for start, stop in spans[0]] if spans else []


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def read_chat_template(directory: Path, settings: Mapping[str, Any], day: date | None = None) -> ChatTemplate | None:
    """Read the model's templates from where transformers reads them; return None if there are none.

    These are the files chat_template.jinja and additional_chat_templates/NAME.jinja or, if neither exists, the entry
    in tokenizer_config.json (`settings`): a text, or a list of named texts. day: see `ChatTemplate`. Raises ConfigError
    naming the file if a file cannot be read, the entry is not a template, or no template is named "default".
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
            f"{path}: the templates are named {', '.join(texts)}, none of them default. Add chat_template.jinja: "
            "conversations without tools need it."
        )
    return ChatTemplate(texts, _special_tokens(settings), f"chat template ({path})", day=day)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8: {error}. Download it again.") from error


def _named_texts(written: Any, path: Path) -> dict[str, str]:
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
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
