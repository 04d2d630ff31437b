"""Verbs of other distributions: entry points of the group `surogate.commands`, imported when they are used.

The value is `module:object`, a Typer app, a function, or a command that Typer made. The core's own verbs cannot be
replaced; an attempt is told by `surogate plugins`.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import typer
from click import ClickException
from typer.main import get_command

from ..errors import PluginError, SurogateError
from ..origin import described
from ..plugins.switch import switched_off

GROUP: Final = "surogate.commands"
CORE_VERBS: Final = ("train", "pt", "sft", "plan", "merge", "tokenize", "verify", "profile", "plugins", "doctor")


@dataclass(frozen=True)
class Verb:
    """A verb of a distribution. `problem`: why it cannot be used, empty when it can."""

    name: str
    distribution: str
    version: str
    entry: importlib.metadata.EntryPoint
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def all_verbs() -> list[Verb]:
    """Every entry point of the group that is not switched off, by name."""
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        name, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
        if not switched_off(entry.name, name, os.environ):
            found.append(Verb(entry.name, name, version, entry))
    found.sort(key=lambda verb: (verb.name, verb.distribution))
    return [_judge(verb, found) for verb in found]


def _judge(verb: Verb, others: list[Verb]) -> Verb:
    problem = ""
    twins = [other for other in others if other.name == verb.name and other is not verb]
    if verb.name in CORE_VERBS:
        problem = f"'{verb.name}' is a verb of surogate itself and cannot be replaced"
    elif twins:
        problem = (
            f"verb '{verb.name}' is provided by {verb} and {twins[0]}; uninstall one or set "
            f"SUROGATE_PLUGINS=-{twins[0].distribution}"
        )
    return Verb(verb.name, verb.distribution, verb.version, verb.entry, problem)


def external_verbs() -> Mapping[str, Verb]:
    """Verbs by name, without those that try to replace one of the core's."""
    return {verb.name: verb for verb in all_verbs() if verb.name not in CORE_VERBS}


def stand_in(verb: Verb) -> Any:
    """A command with the verb's name that only help looks at: the real one is not imported for a listing."""
    listing = typer.Typer(add_completion=False)
    listing.command(verb.name, help=f"From {verb}.")(lambda: None)
    return get_command(listing)


def load_verb(verb: Verb) -> Any:
    """Import a verb. Raises PluginError when two distributions claim it, or the import fails."""
    if verb.problem:
        raise PluginError(verb.problem, distribution=verb.distribution, version=verb.version)
    try:
        target = verb.entry.load()
        if isinstance(target, typer.Typer):
            command = get_command(target)
        elif hasattr(target, "make_context"):
            command = target
        else:
            wrapper = typer.Typer(add_completion=False)
            wrapper.command(verb.name)(target)
            command = get_command(wrapper)
    except Exception as error:
        raise PluginError(
            f"verb '{verb.name}' of {verb} cannot be used: {verb.entry.value}: {type(error).__name__}: {error}",
            distribution=verb.distribution,
            version=verb.version,
        ) from error
    command.invoke = _attributed(verb, command.invoke)  # type: ignore[method-assign, assignment]
    return command


def _attributed(verb: Verb, invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What goes wrong in a verb names its distribution. Errors of ours, click's and signals pass through."""

    def call(context: Any) -> Any:
        try:
            return invoke(context)
        except (SurogateError, ClickException, typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            raise PluginError(
                f"verb '{verb.name}' of {verb} failed: {described(error)}",
                distribution=verb.distribution,
                version=verb.version,
            ) from error

    return call
