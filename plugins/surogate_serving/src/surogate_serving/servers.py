"""The server at an address, by what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from surogate_core.errors import ConfigError

from .connection import Connection, Refused, shown
from .llama_cpp import LlamaServer
from .protocol import Server, entries
from .sglang import SGLang
from .vllm import VLLM

PROGRAMS: Final[Mapping[str, Callable[[Connection], Server]]] = {
    "vllm": VLLM,
    "sglang": SGLang,
    "llamacpp": LlamaServer,
}
"""`owned_by` of a model in /v1/models -> the protocol."""

MARKS: Final = (
    ("/props", "default_generation_settings", LlamaServer),
    ("/model_info", "is_generation", SGLang),
    ("/version", "version", VLLM),
)
"""Routes that tell a program whose models are owned by another name: the route, a key of its answer, the protocol."""

_MODELS: Final = "/v1/models"


def open_server(connection: Connection) -> Server:
    """Wait for a server. Raises ConfigError for one that answers as none whose protocol is known."""
    asked: list[str] = []
    try:
        owners = {str(entry.get("owned_by")) for entry in entries(connection.wait(_MODELS))}
    except Refused as error:
        asked.append(f"{_MODELS}: status {error.status}")
    else:
        for owner in owners & PROGRAMS.keys():
            return PROGRAMS[owner](connection)
        asked.append(f"{_MODELS}: models of {shown(', '.join(sorted(owners)) or 'nobody')}")
    for route, key, program in MARKS:
        try:
            answer: Any = connection.get(route)
        except Refused as error:
            asked.append(f"{route}: status {error.status}")
            continue
        if isinstance(answer, dict) and key in answer:
            return program(connection)
        asked.append(f"{route}: no {key}")
    raise ConfigError(
        f"{connection.url}: answers as none of vLLM, SGLang and llama-server. Asked: {'; '.join(asked)}. Name the "
        "server itself and not a proxy, serve the model with one of the three, or name a folder of its files."
    )


def chosen_model(server: Server, name: str | None) -> str:
    """Return the name of the model that is asked. Raises ConfigError if the server has no such one, or several."""
    models = server.models()
    names = [model.name for model in models]
    if name is None:
        whole = [model.name for model in models if model.parent is None]
        if len(whole) != 1:
            raise ConfigError(f"{server.where}: serves {_listed(names)}. Choose one with --name.")
        return whole[0]
    if name not in names:
        raise ConfigError(
            f"--name {shown(name)}: the server has no such model; it serves {_listed(names)}. Use one of these names."
        )
    return name


def chosen_adapter(server: Server, name: str, base: str | None) -> tuple[str, str]:
    """Return the names of an adapter and of its base, which may be given. Raises ConfigError if one is not served."""
    models = {model.name: model for model in server.models()}
    if name not in models:
        raise ConfigError(
            f"--adapter {shown(name)}: the server has no such adapter; it serves {_listed([*models])}. "
            f"{server.words.adapter.format(name=name)}"
        )
    parent = models[name].parent
    if base is None and parent is not None and parent in models:
        return name, parent
    return name, chosen_model(server, base)


def _listed(names: list[str]) -> str:
    return shown(", ".join(names) or "nothing")
