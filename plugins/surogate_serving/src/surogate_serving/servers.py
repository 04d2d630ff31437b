"""The server at an address, by the program that it says it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from surogate_core.errors import ConfigError

from .connection import Connection, shown
from .protocol import Server, entries
from .vllm import VLLM

PROGRAMS: Final[Mapping[str, Callable[[Connection], Server]]] = {"vllm": VLLM}
"""`owned_by` of a model in /v1/models -> the protocol."""


def open_server(connection: Connection) -> Server:
    """Wait for a server. Raises ConfigError for one whose protocol is not known."""
    owners = {str(entry.get("owned_by")) for entry in entries(connection.wait("/v1/models"))}
    for owner in owners & PROGRAMS.keys():
        return PROGRAMS[owner](connection)
    raise ConfigError(
        f"{connection.url}: is a server of {shown(', '.join(sorted(owners)) or 'no model')}. This check knows the "
        f"protocols of {', '.join(PROGRAMS)}. Serve the model with one of them."
    )


def chosen_model(server: Server, name: str | None) -> str:
    """Return the name of the model that is asked. Raises ConfigError if the server has no such one, or several."""
    models = server.models()
    names = [model.name for model in models]
    if name is None:
        whole = [model.name for model in models if model.parent is None]
        if len(whole) != 1:
            raise ConfigError(f"{server.connection.url}: serves {_listed(names)}. Choose one with --name.")
        return whole[0]
    if name not in names:
        raise ConfigError(
            f"--name {name}: the server has no such model; it serves {_listed(names)}. Use one of these names."
        )
    return name


def chosen_adapter(server: Server, name: str, base: str | None) -> tuple[str, str]:
    """Return the names of an adapter and of its base, which may be given. Raises ConfigError if one is not served."""
    models = {model.name: model for model in server.models()}
    if name not in models:
        raise ConfigError(
            f"--adapter {name}: the server has no such adapter; it serves {_listed([*models])}. Start vLLM with "
            f"--enable-lora --lora-modules {name}=output/adapter."
        )
    parent = models[name].parent
    if base is None and parent is not None and parent in models:
        return name, parent
    return name, chosen_model(server, base)


def _listed(names: list[str]) -> str:
    return shown(", ".join(names) or "nothing")
