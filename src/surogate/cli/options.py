"""Arguments and options that several commands take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Final

import typer

from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from ..config.adapter import Mode

SILENT_SECONDS: Final = 2.0

ConfigArgument = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="PATH", help="The same, as an option.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file. Repeatable.")
]
CheckFiniteOption = Annotated[
    bool, typer.Option("--check-finite", help="Stop at the first op that writes NaN or inf, and name it.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="Device to plan for, such as h200. Default: this machine's."),
]
GpusOption = Annotated[
    int | None,
    typer.Option("--gpus", min=1, metavar="N", help="GPUs of all machines. Default: on each, those of the key `gpus`."),
]
NodesOption = Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Machines, each with as many GPUs.")]
FitOption = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="TARGET",
        help="The fastest settings that fit, with the same rows per step: a device (h200), a size (24GiB), or auto.",
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Allow a model in OUTPUT: it is moved aside when the new one is written.")
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="MODEL", help="Base of an adapter: folder or hub id. Default: the one that the adapter names."
    ),
]
KindOption = Annotated[
    str | None, typer.Option("--adapter", metavar="NAME", help="Kind of adapter. Default: by the file in its folder.")
]
RunOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="YAML file of the run, to load the plugins that it names."),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write a page, one file that a browser shows without a server."),
]
SftOption = Annotated[bool, typer.Option("--sft", help="Use the defaults of `surogate sft`: train an adapter.")]
PtOption = Annotated[bool, typer.Option("--pt", help="Use the defaults of `surogate pt`.")]


@dataclass(frozen=True)
class RunArguments:
    """The run that a command is about.

    config     path of the YAML file
    overrides  "key=value" of each --set
    mode       the command whose defaults the run takes
    """

    config: Path
    overrides: list[str]
    mode: Mode = "train"


def run_arguments(
    ctx: typer.Context, path: Path | None, option: Path | None, overrides: list[str] | None, mode: Mode
) -> RunArguments:
    """Combine the arguments of a command. Without a config file: print help on stderr, and raise ConfigError."""
    if path is not None and option is not None and path != option:
        raise ConfigError(f"two config files: {path} and --config {option}. Give one")
    config = path or option
    if config is None:
        typer.echo(ctx.get_help(), err=True)
        raise ConfigError(f"No config file. Give one: surogate {ctx.info_name} run.yaml")
    return RunArguments(config, overrides or [], mode)


def mode_of(sft: bool, pt: bool) -> Mode:
    if sft and pt:
        raise ConfigError("--sft and --pt: a run has the defaults of one command. Give one")
    return "sft" if sft else "pt" if pt else "train"


def say_at_work(ctx: typer.Context) -> None:
    """Print a line in the terminal after SILENT_SECONDS, for a command that may print nothing for long."""
    if not sys.stderr.isatty():
        return
    line = f"surogate {ctx.info_name}: at work, which may take some time"
    timer = Timer(SILENT_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    ctx.call_on_close(timer.cancel)


def print_notices(arguments: RunArguments | None = None) -> None:
    """Print one line on stderr for each plugin that did not load. Only a run that needs the plugin fails.

    A file that the run of `arguments` names is refused if it does not load.
    """
    from surogate_core.plugins.discovery import load_registry

    from ..config.plugin_files import plugin_files, read_run
    from .render import print_warning

    files = plugin_files(read_run(arguments.config, arguments.overrides)) if arguments else ()
    for notice in load_registry(files=files).notices:
        print_warning(notice)
