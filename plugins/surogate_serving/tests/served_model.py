"""A server in this process that speaks the protocols of vLLM, SGLang and llama-server with models of transformers.

Faults can be planted in it. Routes and answers are those of vLLM 0.32 and llama.cpp of October 2026, which were run,
and of SGLang 0.5.23, whose sources were read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
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
    speaks      vllm, sglang, llamacpp or other
    key         that requests must have
    unready     requests that are answered by 503 first
    busy        requests of completions that are answered by 503 first
    top         likeliest tokens that may be asked for
    owned_by    the program that it says it is; None: that whose protocol it speaks
    form        type of weights that llama-server says
    old         SGLang: whether /tokenize takes texts alone, as that of 0.5.9
    answer      replaces each answer: route -> body, or None for the usual one
    asked       routes of all requests
    """

    models: dict[str, ServedModel]
    speaks: str = "vllm"
    key: str | None = None
    unready: int = 0
    busy: int = 0
    top: int = 20
    owned_by: str | None = None
    form: str = "all F32"
    old: bool = False
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
    found = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llama_server, "other": _other}[behaviour.speaks](
        behaviour, route, body
    )
    status, answer = found if isinstance(found, tuple) else (200, found)
    return status, json.dumps(answer).encode()


Answer = Any
"""What is written as JSON; with a status in front, if that is not 200."""
_NO_ROUTE = (404, {"detail": "Not Found"})
_BUSY = (503, {"error": {"message": "busy"}})


def _listed(behaviour: Behaviour) -> Answer:
    owner = behaviour.owned_by or behaviour.speaks
    return {"data": [{"id": n, "owned_by": owner, "parent": m.parent} for n, m in behaviour.models.items()]}


def _vllm(behaviour: Behaviour, route: str, body: dict[str, Any]) -> Answer:
    if route == "/version":
        return {"version": "0.32.0"}
    if route == "/v1/models":
        return _listed(behaviour)
    if route not in ("/tokenize", "/v1/completions"):
        return _NO_ROUTE
    served = behaviour.models.get(body["model"])
    if served is None:
        return 404, {"message": "no such model"}
    if route == "/tokenize":
        if served.template == "":
            return 400, {"message": "roles must alternate"}
        return {"tokens": _encoded(served, _rendered(served, body, VLLM_TOOL))}
    if behaviour.busy:
        behaviour.busy -= 1
        return _BUSY
    if body.get("prompt_logprobs", 0) > behaviour.top:
        return 400, {"message": "prompt_logprobs is larger than max_logprobs"}
    ids = body["prompt"]
    if "logit_bias" in body:
        (token,) = map(int, body["logit_bias"])
        return {"choices": [{"finish_reason": "stop" if token in served.stops else "length"}]}
    listed: list[Any] = [None]
    for row, token in zip(_rows(served, ids), ids[1:], strict=False):
        listed.append({str(t): {"logprob": float(row[t])} for t in {*_best(row, body["prompt_logprobs"]), token}})
    return {"choices": [{"finish_reason": "length", "prompt_logprobs": listed}]}


def _sglang(behaviour: Behaviour, route: str, body: dict[str, Any]) -> Answer:
    if route == "/model_info":
        return {"model_path": "here", "is_generation": True}
    if route == "/v1/models":
        return _listed(behaviour)
    if route == "/tokenize":
        served = behaviour.models[body["model"]]
        if behaviour.old:
            return 400, {"message": "1 validation error: {'loc': ('body', \"prompt\"), 'msg': 'Field required'}"}
        if served.template == "":
            return 400, {"message": "roles must alternate"}
        return {"tokens": _encoded(served, _rendered(served, body, None)), "count": 0}
    if route != "/generate":
        return _NO_ROUTE
    if behaviour.busy:
        behaviour.busy -= 1
        return _BUSY
    base = next(model for model in behaviour.models.values() if model.parent is None)
    served = behaviour.models[body["lora_path"]] if "lora_path" in body else base
    ids, sampling = body["input_ids"], body["sampling_params"]
    if "logit_bias" in sampling:
        (token,) = map(int, sampling["logit_bias"])
        stops = token in served.stops
        reason = {"type": "stop", "matched": token} if stops else {"type": "length", "length": 2}
        return {"text": "", "meta_info": {"finish_reason": reason}}
    assert body["return_logprob"] and body["logprob_start_len"] == 0
    own: list[Any] = [[None, ids[0], None]]
    best: list[Any] = [None]
    for row, token in zip(_rows(served, ids), ids[1:], strict=False):
        own.append([float(row[token]), token, None])
        best.append([[float(row[t]), t, None] for t in _best(row, body["top_logprobs_num"])])
    return {"text": "", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": best}}


def _llama_server(behaviour: Behaviour, route: str, body: dict[str, Any]) -> Answer:
    name, base = next((name, model) for name, model in behaviour.models.items() if model.parent is None)
    adapters = [(n, model) for n, model in behaviour.models.items() if model.parent is not None]
    if route == "/v1/models":
        return {"data": [{"id": name, "owned_by": behaviour.owned_by or "llamacpp"}]}
    if route == "/lora-adapters":
        return [{"id": number, "path": f"{n}.gguf", "scale": 1.0} for number, (n, _) in enumerate(adapters)]
    if route == "/props":
        return {"default_generation_settings": {}, "model_ftype": behaviour.form}
    if route == "/apply-template":
        variables = {"date_string": date.today().strftime("%d %b %Y"), **body.get("chat_template_kwargs", {})}
        first, *others = body["messages"]
        if first["role"] == "system" and variables.get("style") == "plain":  # such a template writes none
            others[0]["content"] = f"{first['content']}\n{others[0]['content']}"
            body = {**body, "messages": others}
        body = {**body, "chat_template_kwargs": variables}
        if base.template == "":
            return 500, {"error": {"message": "roles must alternate"}}
        return {"prompt": _rendered(base, body, LLAMA_TOOL, continues=True)}
    if route == "/tokenize":
        assert body["add_special"] and body["parse_special"]
        return {"tokens": _encoded(base, body["content"])}
    if route != "/completion":
        return _NO_ROUTE
    if behaviour.busy:
        behaviour.busy -= 1
        return _BUSY
    scales = {entry["id"]: entry["scale"] for entry in body.get("lora", [])}
    applied = [model for number, (_, model) in enumerate(adapters) if scales.get(number, float("lora" not in body))]
    served = applied[0] if applied else base
    ((token, _),) = body["logit_bias"]
    stop = "eos" if token in served.stops else "limit"
    if not body.get("n_probs"):
        return {"content": "", "stop_type": stop}
    if _ends_inside(served.tokenizer, token):
        return {"content": "\ufffd", "stop_type": stop}
    row = _rows(served, body["prompt"])[-1]
    best = [{"id": t, "logprob": float(row[t])} for t in _best(row, body["n_probs"])]
    written = {"id": token, "logprob": float(row[token]), "top_logprobs": best}
    return {"content": "", "stop_type": stop, "completion_probabilities": [written]}


def _other(behaviour: Behaviour, route: str, body: dict[str, Any]) -> Answer:
    if route == "/model_info":
        return {"name": "other"}
    return _listed(behaviour) if route == "/v1/models" else _NO_ROUTE


VLLM_TOOL = {"name": None, "description": None, "parameters": None}
LLAMA_TOOL = {"name": "", "description": "", "parameters": {}}


def _rendered(
    served: ServedModel, body: dict[str, Any], missing: dict[str, Any] | None, continues: bool = False
) -> str:
    """Return messages as text. missing: values of keys of a tool that is not given them, as the server's classes do;
    None: those of SGLang, which stand behind the others."""
    messages = json.loads(json.dumps(body["messages"]))
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = None if "tools" in served.drops else body.get("tools")
    for tool in tools or ():
        given = tool["function"]
        if missing is None:
            tool["function"] = {**given, **{key: given.get(key) for key in ("description", "parameters")}}
            tool["defer_loading"] = None
        else:
            tool["function"] = {**missing, **given}
    text: str = served.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=served.template,
        add_generation_prompt=body["add_generation_prompt"],
        continue_final_message=continues and messages[-1]["role"] == "assistant",
        tokenize=False,
        **({} if "chat_template_kwargs" in served.drops else body.get("chat_template_kwargs", {})),
    )
    return text


def _encoded(served: ServedModel, text: str) -> list[int]:
    ids: list[int] = served.tokenizer(text, add_special_tokens=False).input_ids
    return ids if served.bos_twice is None else [served.bos_twice, *ids]


@torch.no_grad()
def _rows(served: ServedModel, ids: list[int]) -> Any:
    return torch.log_softmax(served.model(torch.tensor([ids])).logits[0].float(), -1)


def _best(row: Any, count: int) -> list[int]:
    found: list[int] = row.topk(count).indices.tolist() if count else []
    return found


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}
"""Character of a byte-level vocabulary -> the byte."""


def _ends_inside(tokenizer: Any, token: int) -> bool:
    """Return whether a token ends inside of a character: with the byte that begins one, and too few that follow it."""
    written = [_BYTES[char] for char in tokenizer.convert_ids_to_tokens(token)]
    for back, byte in enumerate(reversed(written[-3:]), 1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < 2 + (byte >= 0xE0) + (byte >= 0xF0)
    return False
