"""The chat template of a model directory: messages to text, by the engine and the rules of transformers.

Importing transformers' engine takes about a second and imports no torch; it happens with the first rendering.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Characters from the first to behind the last."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The engine keeps the spans of a rendering in the compiled template, and rendering holds the interpreter's lock anyway.
_LOCK = threading.Lock()


class ChatTemplate:
    """Renders messages. special_tokens: bos_token, eos_token, ... as the template's variables.

    generation_prompt: what the template puts before an answer that is to be generated; empty when nothing.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], where: str) -> None:
        """`sources`: templates by name; "tool_use" serves rows with tools where there is one, "default" the others."""
        self._sources = sources
        self._special_tokens = special_tokens
        self.where = where
        self._prompts: dict[str, str] = {}

    def marks_generation(self, tools: Sequence[Any] | None) -> bool:
        """Whether the template itself says by `{% generation %}` what the assistant generates."""
        return _GENERATION.search(self._source(tools)) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False) -> str:
        """The text of `messages`; with `prompt`, up to where the next answer begins. ConfigError if it refuses."""
        return self._render(messages, tools, add_generation_prompt=prompt)[0]

    def render_spans(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """The text of `messages` and its `{% generation %}` blocks."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def generation_prompt(self, tools: Sequence[Any] | None) -> str:
        """What the template adds where an answer is to begin ("<|im_start|>assistant\\n"); empty when nothing."""
        source = self._source(tools)
        if source not in self._prompts:
            asked = [{"role": "user", "content": "a"}]
            without, with_prompt = self.render(asked, tools), self.render(asked, tools, prompt=True)
            if not with_prompt.startswith(without):
                raise ConfigError(
                    f"{self.where}: add_generation_prompt changes what stands before the answer, so that what is "
                    "trained cannot be told. Mark it in the template by {% generation %} ... {% endgeneration %}."
                )
            self._prompts[source] = with_prompt[len(without) :]
        return self._prompts[source]

    def _source(self, tools: Sequence[Any] | None) -> str:
        return self._sources["tool_use" if tools and "tool_use" in self._sources else "default"]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, **how: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        settings: dict[str, Any] = {**self._special_tokens, **how}
        try:
            with _LOCK:
                rendered: Any = render_jinja_template(
                    [[dict(message) for message in messages]],
                    tools=list(tools) if tools else None,
                    chat_template=self._source(tools),
                    **settings,
                )
        except Exception as error:  # what the template raises, and whatever Jinja raises when it runs
            raise ConfigError(f"{self.where} refuses these messages: {type(error).__name__}: {error}") from error
        texts, spans = rendered
        return texts[0], [(int(start), int(stop)) for start, stop in spans[0]] if spans else []


def read_chat_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in chat_template.jinja or, without this file, in tokenizer_config.json (`settings`); None: none.

    Raises ConfigError naming the file when it holds no template.
    """
    path = directory / "chat_template.jinja"
    written: Any = settings.get("chat_template")
    if path.is_file():
        try:
            written = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read as UTF-8: {error}. Fetch it again.") from error
    else:
        path = directory / "tokenizer_config.json"
    if written is None:
        return None
    if isinstance(written, list) and all(isinstance(entry, dict) for entry in written):
        sources = {str(entry.get("name")): entry.get("template") for entry in written}
    else:
        sources = {"default": written}
    if not isinstance(sources.get("default"), str):
        raise ConfigError(
            f"{path}: chat_template is {json.dumps(written)[:60]}, not the text of a template, nor a list with one "
            "named default. Take the file from the model's repository."
        )
    texts = {name: text for name, text in sources.items() if isinstance(text, str)}
    return ChatTemplate(texts, _special_tokens(settings), f"chat template ({path})")


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of bos_token, eos_token and the like."""
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
