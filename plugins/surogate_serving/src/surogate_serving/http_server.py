"""A server at an address: the members of `Server` that its programs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from . import protocol
from .connection import Connection
from .protocol import Rendering, ServedModel, Words


@dataclass
class HttpServer:
    """The members as most programs have them. A program names itself, and has the others of `Server`."""

    connection: Connection
    program: str = field(init=False)
    words: Words = field(init=False)
    own_error: float = 0.0
    least: float = -inf
    left_out: str = ""
    continues: bool = False
    adapter: str | None = None

    @property
    def where(self) -> str:
        return self.connection.url

    def models(self) -> Sequence[ServedModel]:
        return protocol.served_models(self.connection.get("/v1/models"))

    def form(self) -> str | None:
        return None


def asked(model: str, rendering: Rendering, prompt: bool) -> dict[str, Any]:
    """Return a request for the tokens of messages, at /tokenize of vLLM and SGLang."""
    body: dict[str, Any] = {
        "model": model,
        "messages": protocol.sent(rendering.messages),
        "add_generation_prompt": prompt,
    }
    if rendering.tools:
        body["tools"] = list(rendering.tools)
    if rendering.variables:
        body["chat_template_kwargs"] = dict(rendering.variables)
    return body
