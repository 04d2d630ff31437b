"""SGLang: /tokenize renders messages, /generate has the log probabilities of the tokens that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from surogate_core.errors import ConfigError

from . import protocol
from .connection import Refused, shown
from .http_server import HttpServer, asked
from .protocol import NotGiven, OwnForm, Rendering, ServedModel, Words

_TOP: Final = 20
"""Likeliest tokens that are asked for."""
_FILLED: Final = ("description", "parameters")
"""Keys that SGLang puts behind those of a function, as null, where it does not have them."""
_NO_ROUTE: Final = (404, 405)
_WRONG_INPUT: Final = (400, 422)

WORDS: Final = Words(
    template="without another --chat-template, or name it with --chat-template",
    variables="Use a version of SGLang whose /tokenize reads chat_template_kwargs, and send them with each request.",
    ends="SGLang reads that file of the folder at --model-path when it starts.",
    dtype="Start SGLang with --dtype {dtype}",
    adapter="Start SGLang with --enable-lora --lora-paths {name}=output/adapter.",
)


@dataclass
class SGLang(HttpServer):
    """A server of SGLang."""

    program: str = "SGLang"
    words: Words = WORDS
    _renders_whole: bool | None = field(default=None, repr=False)
    _adapters: frozenset[str] = field(default=frozenset(), repr=False)

    def models(self) -> Sequence[ServedModel]:
        served = super().models()
        self._adapters = frozenset(model.name for model in served if model.parent is not None)
        return served

    def own_forms(self, rendering: Rendering) -> Iterator[OwnForm]:
        tools = protocol.functions(rendering.tools, lambda given: {**given, **{key: given.get(key) for key in _FILLED}})
        for more in ({"defer_loading": None}, {}):  # 0.5.23 has it in each tool
            filled = [{**tool, **more} if isinstance(tool, dict) else tool for tool in tools]
            yield from protocol.own_tools(self.program, rendering, filled)

    def ids(self, model: str, rendering: Rendering) -> list[int]:
        found = self._ids(model, rendering, rendering.prompt)
        if not rendering.prompt and self._renders_whole is None:
            self._renders_whole = found != self._ids(model, rendering, True)
        if not rendering.prompt and not self._renders_whole:
            raise NotGiven("this version of SGLang renders no messages without the start of an answer; 0.5.23 does")
        return found

    def _ids(self, model: str, rendering: Rendering, prompt: bool) -> list[int]:
        try:
            return protocol.token_ids(self.connection.post("/tokenize", asked(model, rendering, prompt)), "tokens")
        except Refused as error:
            if error.status in _NO_ROUTE or (error.status in _WRONG_INPUT and _asks_for_prompt(error.said)):
                raise NotGiven("this version of SGLang renders no messages at /tokenize; 0.5.23 does") from None
            raise

    def log_probs(self, model: str, ids: Sequence[int], wanted: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
        body = {
            **self._asked(model, ids, {"max_new_tokens": 1, "temperature": 0}),
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": _TOP,
        }
        meta = protocol.field(self.connection.post("/generate", body), "meta_info")
        own, best = (protocol.field(meta, name) for name in ("input_token_logprobs", "input_top_logprobs"))
        if not all(isinstance(listed, list) and len(listed) == len(ids) for listed in (own, best)):
            raise ConfigError(
                f"{self.where}: the answer has no input_token_logprobs of the {len(ids)} tokens. Serve with a version "
                "of SGLang that gives them."
            )
        return {at: _of_position(own[at], best[at], ids[at]) for at in wanted}

    def _asked(self, model: str, ids: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request of /generate, which knows adapters by name and no other models."""
        adapter = {"lora_path": model} if model in self._adapters else {}
        return {"input_ids": list(ids), "sampling_params": dict(sampling), **adapter}

    def stops(self, model: str, before: Sequence[int], end: int) -> bool:
        sampling = {"max_new_tokens": 2, "temperature": 0, "logit_bias": {str(end): 100}}
        answer = self.connection.post("/generate", self._asked(model, before, sampling))
        return bool(protocol.field(answer, "meta_info", "finish_reason", "type") == "stop")


def _asks_for_prompt(said: str) -> bool:
    """Return whether a server refuses messages because it knows texts alone: it lacks the field `prompt`."""
    return "prompt" in said and "required" in said


def _of_position(own: Any, best: Any, token: int) -> dict[int, float]:
    """Return log probabilities of one position, which are lists of a log probability, a token and its text."""
    try:
        found = {int(entry[1]): protocol.number(entry[0]) for entry in [own, *(best or ())]}
    except (IndexError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"the answer has logprobs {shown(str([own, best]))!r}, not a log probability and a token for each."
        ) from None
    if token not in found:
        raise ConfigError(f"the answer has input_token_logprobs without the token {token} of the prompt.")
    return found
