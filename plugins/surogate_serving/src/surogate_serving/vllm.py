"""vLLM: /tokenize renders messages, completions of token ids have the log probabilities of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from surogate_core.errors import ConfigError

from . import protocol
from .connection import Refused, shown
from .http_server import HttpServer, asked
from .protocol import OwnForm, Rendering, Words

_TOP: Final = 20
"""Likeliest tokens that are asked for: as many as the server allows by default."""

_FUNCTION: Final = ("name", "description", "parameters")
"""Keys of a function, in the order in which vLLM has them; those that are not given are null."""

WORDS: Final = Words(
    template="without another --chat-template, or name it with --chat-template",
    variables="Use a version of vLLM that reads chat_template_kwargs, or start it with --default-chat-template-kwargs.",
    ends="vLLM reads the generation_config.json of another folder with --generation-config FOLDER.",
    dtype="Start vLLM with --dtype {dtype}",
    adapter="Start vLLM with --enable-lora --lora-modules {name}=output/adapter.",
)


@dataclass
class VLLM(HttpServer):
    """A server of vLLM."""

    program: str = "vLLM"
    words: Words = WORDS
    _top: int = field(default=_TOP, repr=False)

    def own_forms(self, rendering: Rendering) -> Iterator[OwnForm]:
        tools = protocol.functions(rendering.tools, lambda given: {**dict.fromkeys(_FUNCTION), **given})
        yield from protocol.own_tools(self.program, rendering, tools)

    def ids(self, model: str, rendering: Rendering) -> list[int]:
        body = asked(model, rendering, rendering.prompt)
        return protocol.token_ids(self.connection.post("/tokenize", body), "tokens")

    def log_probs(self, model: str, ids: Sequence[int], wanted: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
        listed = protocol.field(self._completed(model, ids), "choices", 0, "prompt_logprobs")
        if not isinstance(listed, list) or len(listed) != len(ids):
            raise ConfigError(
                f"{self.connection.url}: the answer has no prompt_logprobs of the {len(ids)} tokens. Serve with a "
                "version of vLLM that gives them."
            )
        return {at: _of_position(listed[at], ids[at]) for at in wanted}

    def _completed(self, model: str, ids: Sequence[int]) -> Any:
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        try:
            return self.connection.post("/v1/completions", {**body, "prompt_logprobs": self._top})
        except Refused as error:
            if not self._top or "logprobs" not in error.said:
                raise
            self.connection.notice(f"the server gives no {_TOP} likeliest tokens, so there is no KL: {error.said}")
            self._top = 0
            return self.connection.post("/v1/completions", {**body, "prompt_logprobs": 0})

    def stops(self, model: str, before: Sequence[int], end: int) -> bool:
        body = {"model": model, "prompt": list(before), "max_tokens": 2, "temperature": 0}
        answer = self.connection.post("/v1/completions", {**body, "logit_bias": {str(end): 100}})
        return bool(protocol.field(answer, "choices", 0, "finish_reason") == "stop")


def _of_position(listed: Any, token: int) -> dict[int, float]:
    try:
        found = {int(key): protocol.number(entry["logprob"]) for key, entry in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(f"the answer has prompt_logprobs {shown(str(listed))!r}, not one for each token.") from None
    if token not in found:
        raise ConfigError(f"the answer has prompt_logprobs without the token {token} of the prompt.")
    return found
