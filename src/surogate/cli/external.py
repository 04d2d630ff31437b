"""Commands of other packages: entry points of the group `surogate.commands`, imported when they are used.

The value is `module:object`: a Typer app, a function, or a command made by Typer. The help of a function is its
docstring, in which a last section "Examples:" keeps its lines. The entry point `plugins.test` is the command
`surogate plugins test`. Core's own commands cannot be replaced; `surogate plugins` reports an attempt.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import typer
from click import ClickException
from typer.main import get_command

from surogate_core.errors import PluginError, SurogateError, described
from surogate_core.plugins.switch import switched_off

from .examples import last_of_help

GROUP: Final = "surogate.commands"
CORE_COMMANDS: Final = (
    *("train", "pt", "sft", "plan", "export", "merge", "quantize"),
    *("tokenize", "report", "generate", "chat", "plugins", "schema", "doctor"),
)


@dataclass(frozen=True)
class Command:
    """A command of a distribution. `problem`: why it cannot be used; "" if it can."""

    name: str
    distribution: str
    version: str
    entry: importlib.metadata.EntryPoint
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def all_commands() -> list[Command]:
    """Return every entry point of the group that is not switched off, sorted by name."""
    found = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        name, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
        if not switched_off(entry.name, name, os.environ):
            found.append(Command(entry.name.replace(".", " "), name, version, entry))
    found.sort(key=lambda command: (command.name, command.distribution))
    return [_checked(command, found) for command in found]


def _checked(command: Command, others: list[Command]) -> Command:
    problem = ""
    twins = [other for other in others if other.name == command.name and other is not command]
    if command.name in CORE_COMMANDS:
        problem = f"'{command.name}' is a command of surogate itself and cannot be replaced"
    elif twins:
        problem = (
            f"command '{command.name}' is provided by {command} and {twins[0]}; uninstall one or set "
            f"SUROGATE_PLUGINS=-{twins[0].distribution}"
        )
    return replace(command, problem=problem)


def external_commands() -> Mapping[str, Command]:
    """Return commands by name, without those that try to replace one of core's."""
    return {command.name: command for command in all_commands() if command.name not in CORE_COMMANDS}


def stand_in(command: Command) -> Any:
    """Return a command of the same name for the listing of help, which need not import the real one.

    A summary of its distribution such as "surogate NAME: what it does; surogate OTHER: what that does" says what it
    does.
    """
    dist = command.entry.dist
    has_summary = dist is not None and "Summary" in dist.metadata  # libraries make reading a missing one an error
    summary = dist.metadata["Summary"] if dist is not None and has_summary else ""
    text = said_of(command.name, summary) or f"From {command}."
    return _made(command, lambda: None, help=text, short_help=text)


def said_of(name: str, summary: str) -> str:
    """Return what the summary of a distribution says about one of its commands, as a sentence; "" if nothing."""
    _, _, text = summary.partition(f"surogate {name}: ")
    text = text.partition("; surogate ")[0]
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _parts_of_help(function: Callable[..., Any]) -> tuple[str, str | None]:
    """Return the docstring of a function without its examples, and these as the end of a help text."""
    text, found, examples = inspect.cleandoc(function.__doc__ or "").partition("\nExamples:\n")
    return text.rstrip(), last_of_help(examples.splitlines()) if found else None


def _made(command: Command, function: Callable[..., Any], **how: Any) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)  # help looks as that of core's commands
    app.command(command.name, **how)(function)
    return get_command(app)


def load_command(command: Command) -> Any:
    """Import a command. Raise PluginError if two distributions provide it or the import fails."""
    if command.problem:
        raise PluginError(command.problem)
    try:
        target = command.entry.load()
        if isinstance(target, typer.Typer):
            loaded = get_command(target)
        elif hasattr(target, "make_context"):
            loaded = target
        else:
            text, examples = _parts_of_help(target)
            loaded = _made(command, target, help=text, epilog=examples)
    except Exception as error:
        raise PluginError(
            f"command '{command.name}' of {command} cannot be used: {command.entry.value}: "
            f"{type(error).__name__}: {error}"
        ) from error
    loaded.invoke = _attributed(command, loaded.invoke)  # type: ignore[method-assign, assignment]
    return loaded


def _attributed(command: Command, invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Name the distribution in exceptions of a command. Surogate's own, click's and broken pipes pass through."""

    def call(context: Any) -> Any:
        try:
            return invoke(context)
        except (SurogateError, ClickException, typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            raise PluginError(f"command '{command.name}' of {command} failed: {described(error)}") from error

    return call
