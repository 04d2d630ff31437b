"""The help of every command ends with examples, which the command itself can parse."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from surogate.cli.app import app
from surogate.cli.external import external_commands, load_command

GROUP = get_command(app)


def commands() -> dict[str, Any]:
    """Return every command by its words: those of the program, and those of all installed packages."""
    own: Any = GROUP
    return dict(own.commands) | {name: load_command(command) for name, command in external_commands().items()}


def examples(text: str) -> Iterator[str]:
    _, found, rest = text.partition("Examples:")
    assert found, "no examples"
    lines = [line.strip() for line in rest.strip().splitlines()]
    assert lines and all(line.startswith("surogate ") for line in lines), "examples are not the end of the help"
    yield from lines


@pytest.mark.parametrize("name", sorted({*commands()}))
def test_help_ends_with_examples_that_the_command_parses(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"])
    assert shown.exit_code == 0
    command = commands()[name]
    for line in examples(shown.stdout):
        words = shlex.split(line.partition(" > ")[0])
        assert " ".join(words[1 : 1 + len(name.split())]) == name, line
        context = command.context_class(command, info_name=name, resilient_parsing=False)
        parser = command.make_parser(context)
        values, left, _ = parser.parse_args(words[1 + len(name.split()) :])  # raises for an option that there is not
        assert not left, f"{line}: {left} is read by nothing"
        needed = [p.name for p in command.params if getattr(p, "required", False) and not values.get(p.name)]
        assert not needed, f"{line}: lacks {needed}"


def test_an_example_with_an_option_that_there_is_not_would_be_found() -> None:
    def command(once: bool = False) -> None:
        """Do it.

        Examples:
        surogate made-up --twice
        """

    made = typer.Typer()
    made.command()(command)
    parsed: Any = get_command(made)
    context = parsed.context_class(parsed, info_name="made-up")
    with pytest.raises(Exception, match="twice"):
        parsed.make_parser(context).parse_args(["--twice"])


def test_help_without_a_command_ends_with_what_is_done_first() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert list(examples(shown.stdout))[:2] == ["surogate plan run.yaml", "surogate train run.yaml"]
