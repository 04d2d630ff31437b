"""A server in this process that speaks vLLM's protocol with a model of transformers, and the faults planted in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


@dataclass
class ServedModel:
    """A model behind a name, and what is wrong with it.

    stops     tokens at which generation ends
    template  another chat template; None: that of the folder
    """

    model: Any
    tokenizer: Any
    stops: set[int]
    template: str | None = None
    bos_twice: int | None = None
    drops: set[str] = field(default_factory=set)
    parent: str | None = None


def load(folder: Path, dtype: torch.dtype = torch.float32) -> ServedModel:
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return ServedModel(
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(),
        PreTrainedTokenizerFast.from_pretrained(folder),
        set(stops if isinstance(stops, list) else [stops]),
    )


@dataclass
class Behaviour:
    """How the server answers.

    models      by name
    key         that requests must have
    unready     requests that are answered by 503 first
    top         likeliest tokens that may be asked for
    owned_by    the program that it says it is
    answer      replaces each answer: route -> body, or None for the usual one
    asked       routes of all requests
    """

    models: dict[str, ServedModel]
    key: str | None = None
    unready: int = 0
    top: int = 20
    owned_by: str = "vllm"
    answer: Callable[[str], bytes | None] = lambda route: None
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """Serve while the block runs; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            status, content = _answered(behaviour, self.path, body, self.headers.get("Authorization"))
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", content.decode())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answered(behaviour: Behaviour, route: str, body: dict[str, Any], key: str | None) -> tuple[int, bytes]:
    behaviour.asked.append(route)
    if behaviour.unready:
        behaviour.unready -= 1
        return 503, b"{}"
    if behaviour.key is not None and key != f"Bearer {behaviour.key}":
        return 401, f"wrong key {key}".encode()
    if (given := behaviour.answer(route)) is not None:
        return (302, given) if given.startswith(b"http") else (200, given)
    if route == "/v1/models":
        listed = [{"id": n, "owned_by": behaviour.owned_by, "parent": m.parent} for n, m in behaviour.models.items()]
        return 200, json.dumps({"data": listed}).encode()
    served = behaviour.models.get(body["model"])
    if served is None:
        return 404, b'{"message": "no such model"}'
    if route == "/tokenize" and served.template == "":
        return 400, b'{"message": "roles must alternate"}'
    if route == "/tokenize":
        return 200, json.dumps({"tokens": _tokens(served, body)}).encode()
    if body.get("prompt_logprobs", 0) > behaviour.top:
        return 400, b'{"message": "prompt_logprobs is larger than max_logprobs"}'
    return 200, json.dumps({"choices": [_completed(served, body)]}).encode()


def _tokens(served: ServedModel, body: dict[str, Any]) -> list[int]:
    messages = json.loads(json.dumps(body["messages"]))
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = None if "tools" in served.drops else body.get("tools")
    for tool in tools or ():  # as vLLM's classes do
        given = tool["function"]
        tool["function"] = {**dict.fromkeys(("name", "description", "parameters")), **given}
    text = served.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=served.template,
        add_generation_prompt=body["add_generation_prompt"],
        tokenize=False,
        **({} if "chat_template_kwargs" in served.drops else body.get("chat_template_kwargs", {})),
    )
    ids: list[int] = served.tokenizer(text, add_special_tokens=False).input_ids
    return ids if served.bos_twice is None else [served.bos_twice, *ids]


@torch.no_grad()
def _completed(served: ServedModel, body: dict[str, Any]) -> dict[str, Any]:
    ids = body["prompt"]
    if "logit_bias" in body:
        (token,) = map(int, body["logit_bias"])
        return {"finish_reason": "stop" if token in served.stops else "length"}
    rows = torch.log_softmax(served.model(torch.tensor([ids])).logits[0].float(), -1)
    listed: list[Any] = [None]
    for row, token in zip(rows, ids[1:], strict=False):
        best = row.topk(body["prompt_logprobs"]).indices.tolist() if body["prompt_logprobs"] else []
        listed.append({str(t): {"logprob": float(row[t])} for t in {*best, token}})
    return {"finish_reason": "length", "prompt_logprobs": listed}
