"""llama-server of llama.cpp: /apply-template and /tokenize render messages; log probabilities are of written tokens.

It gives none of a prompt. So each token of a trained answer is forced by a bias, and its log probability is that
before biases and sampling (`post_sampling_probs: false`): one request a token, of which the server keeps the prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import PurePath
from typing import Any, Final

from surogate_core.errors import ConfigError

from . import protocol
from .connection import Refused, shown
from .http_server import HttpServer
from .protocol import OwnForm, Rendering, ServedModel, Words

_TOP: Final = 20
"""Likeliest tokens that are asked for."""
_FORCED: Final = 10_000
"""Bias of a token that is to be written, far above all logits."""
_NO_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"
_LEAST: Final = -87.0
"""Probabilities are numbers of fp32, whose smallest is exp(-87.3). A smaller one is given as the least number."""
_F16_SUMS: Final = 2.0**-10
"""By default keys and values are in F16, and flash attention on a CPU adds in F16, which rounds at each step."""
_ALONE: Final = " (no adapter)"
"""Follows the name of a model in that of the same one without adapters."""
_FORMS: Final = ("BF16", "F16", "F32", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""Types of a GGUF, as `model_ftype` has them: "BF16", "mostly Q8_0", "all F32"."""

_FUNCTION: Final = {"name": "", "description": "", "parameters": {}}
"""Keys of a function that llama-server keeps, with what it puts for those that are not given."""
_DATE: Final = "%d %b %Y"

WORDS: Final = Words(
    template="by exporting the output again: the GGUF has the template. Start llama-server with --jinja and without "
    "--chat-template",
    variables="Start llama-server with --jinja, in a version that reads chat_template_kwargs.",
    ends="llama-server reads the end tokens of the GGUF: export the output again.",
    dtype="Export the GGUF again, in the type of {dtype}",
    adapter="Start llama-server with --lora {name}.gguf, the file of `surogate export --format gguf-lora`.",
)


@dataclass
class LlamaServer(HttpServer):
    """A llama-server."""

    program: str = "llama-server"
    words: Words = WORDS
    own_error: float = _F16_SUMS
    least: float = _LEAST
    left_out: str = "end inside of a character"
    continues: bool = True
    _loras: dict[str, int] = field(default_factory=dict, repr=False)
    _name: str = field(default="", repr=False)

    def models(self) -> Sequence[ServedModel]:
        served = super().models()
        try:
            listed = self.connection.get("/lora-adapters")
        except Refused:  # a router of several models has no adapters of its own
            listed = []
        if not isinstance(listed, list):
            raise ConfigError(f"{self.where}/lora-adapters: the answer is {shown(str(listed))!r}, no list.")
        if not listed or not served:
            return served
        self._name = served[0].name
        self._loras = {
            PurePath(str(protocol.field(entry, "path"))).stem: protocol.token(protocol.field(entry, "id"))
            for entry in listed
        }
        alone = f"{self._name}{_ALONE}"
        return [*served, ServedModel(alone, self._name), *(ServedModel(name, alone) for name in self._loras)]

    def form(self) -> str | None:
        said = str(protocol.field(self.connection.get("/props"), "model_ftype")).upper()
        return next((f"gguf:{form.lower()}" for form in _FORMS if form in said.split()), None)

    def own_forms(self, rendering: Rendering) -> Iterator[OwnForm]:
        tools = protocol.functions(rendering.tools, lambda given: {k: given.get(k, v) for k, v in _FUNCTION.items()})
        yield from protocol.own_tools(self.program, rendering, tools)
        today = date.today().strftime(_DATE)
        yield OwnForm(
            "the date of today is written",
            "llama-server gives the chat template today's date as date_string; training has the template's own. "
            "Start it with --chat-template-kwargs and the date_string that is trained, or train with that in "
            "chat_template_kwargs.",
            replace(rendering, variables={"date_string": today, **rendering.variables}),
        )
        first, *others = rendering.messages
        if first["role"] == "system" and others:
            merged = {**others[0], "content": f"{first['content']}\n{others[0]['content']}"}
            yield OwnForm(
                "the system message is put into the next one",
                "The chat template writes no system message, and llama-server puts it in front of the message of the "
                "user. Write it there in the data, or train with a chat template that writes it.",
                replace(rendering, messages=[merged, *others[1:]]),
            )

    def ids(self, model: str, rendering: Rendering) -> list[int]:
        body: dict[str, Any] = {
            **self._model(model),
            "messages": protocol.sent(rendering.messages),
            "add_generation_prompt": rendering.prompt,
        }
        if rendering.tools:
            body["tools"] = list(rendering.tools)
        if rendering.variables:
            body["chat_template_kwargs"] = dict(rendering.variables)
        try:
            text = protocol.field(self.connection.post("/apply-template", body), "prompt")
        except Refused as error:
            if error.status != 500:
                raise
            raise Refused("/apply-template", 400, error.said) from None  # an error of a template has this status
        asked = {**self._model(model), "content": text, "add_special": True, "parse_special": True}
        return protocol.token_ids(self.connection.post("/tokenize", asked), "tokens")

    def log_probs(self, model: str, ids: Sequence[int], wanted: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
        found = {at: self._forced(model, ids[:at], ids[at]) for at in wanted}
        return {at: listed for at, listed in found.items() if listed}

    def _forced(self, model: str, before: Sequence[int], token: int) -> dict[int, float]:
        """Return log probabilities after some tokens; none for a token that ends inside of a character.

        The server lists such a token with the next one only, if that ends the character, and then without numbers.
        """
        body = {
            **self._completion(model, before, token, _FORCED, 1),
            "n_probs": _TOP,
            "post_sampling_probs": False,
        }
        answer = self.connection.post("/completion", body)
        if not isinstance(answer, dict):
            raise ConfigError(f"{self.where}/completion: the answer is {shown(str(answer))!r}, no text.")
        if "completion_probabilities" not in answer and str(protocol.field(answer, "content")).endswith(_NO_CHARACTER):
            return {}
        written = protocol.field(answer, "completion_probabilities", 0)
        if (found := protocol.field(written, "id")) != token:
            raise ConfigError(
                f"{self.where}: wrote token {shown(str(found))} in place of {token}, which a bias forces. Start "
                "llama-server without a grammar and without a draft model."
            )
        best = protocol.field(written, "top_logprobs")
        if not isinstance(best, list):
            raise ConfigError(f"{self.where}: the answer has top_logprobs {shown(str(best))!r}, no list.")
        return dict(map(_entry, [written, *best]))

    def _completion(self, model: str, before: Sequence[int], token: int, bias: float, most: int) -> dict[str, Any]:
        body = {**self._model(model), "prompt": list(before), "n_predict": most, "temperature": 0}
        return {**body, "logit_bias": [[token, bias]]}

    def _model(self, model: str) -> dict[str, Any]:
        """Return what chooses a model in a request: adapters by their scales, where one is named."""
        if model in self._loras or (self._loras and model == f"{self._name}{_ALONE}"):
            scales = [{"id": number, "scale": float(name == model)} for name, number in self._loras.items()]
            return {"model": self._name, "lora": scales}
        return {"model": model}

    def stops(self, model: str, before: Sequence[int], end: int) -> bool:
        answer = self.connection.post("/completion", self._completion(model, before, end, 100, 2))
        return bool(protocol.field(answer, "stop_type") == "eos")


def _entry(listed: Any) -> tuple[int, float]:
    """Return a token and its log probability."""
    token = protocol.token(protocol.field(listed, "id"))
    return token, max(_LEAST, protocol.number(protocol.field(listed, "logprob")))
