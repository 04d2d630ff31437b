"""The group of all commands: turns errors and results into exit codes, and adds the commands of installed plugins."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from surogate_core.errors import ConfigError, RunStopped, SurogateError

from .signals import INTERRUPTED, received

BROKEN_PIPE: Final = 141

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""UsageError of click, or of the copy of click that typer has."""


class CommandGroup(TyperGroup):
    """Exit codes: 0 done; 2 error in the user's input (one message, no traceback); 1 error in our code (with a
    traceback); 3 the run stopped itself; 130 and 143 interrupted; 141 the reader of our output is gone."""

    def invoke(self, ctx: Any) -> Any:
        as_json = "--json" in (*ctx._protected_args, *ctx.args)
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The interpreter flushes stdout again at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if isinstance(error, _USAGE_ERROR):
                from .usage_hint import usage_hint

                error.message = f"{error.message.rstrip('.')}{usage_hint(error.message)}"
            if (code := received()) and not isinstance(error, RunStopped):
                raise typer.Exit(code) from None  # a library raised the error in place of the exception of the signal
            if as_json and not getattr(error, "told", False):
                from .json_output import failure, print_json

                print_json(failure(error))
            if not isinstance(error, SurogateError) or error.exit_code == 1:
                raise
            from .render import print_error, print_traceback

            if not error.told:
                hint = print_traceback(error)
                print_error(f"{error}{hint}")
            raise typer.Exit(error.exit_code) from None
        raise typer.Exit(result if isinstance(result, int) else 0)

    def list_commands(self, ctx: Any) -> list[str]:
        from .external import external_commands

        return [*super().list_commands(ctx), *sorted(external_commands())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return core's own command or, for a plugin's, a stand-in that help can list without importing the plugin."""
        own: Any = super().get_command(ctx, cmd_name)
        if own is not None:
            own.short_help = own.short_help or own.help  # wrapped in the list of commands, not cut off
            return own
        from .external import external_commands, stand_in

        command = external_commands().get(cmd_name)
        return stand_in(command) if command else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from .external import CORE_COMMANDS, external_commands, load_command

        words = 2 if args[:1] == ["plugins"] else 1
        name = " ".join(args[:words])
        if name and name not in CORE_COMMANDS and (command := external_commands().get(name)):
            return name, load_command(command), args[words:]
        if name not in CORE_COMMANDS:
            from ..config.keys import DISTRIBUTIONS

            if package := DISTRIBUTIONS.get(("command", name)):
                raise ConfigError(f"surogate {name}: is not installed. Try: pip install {package}")
        return super().resolve_command(ctx, args)
