"""The command line's entry: verbs, their options, exit codes. A verb's module is imported when the verb runs.

Exit codes: 0 done; 2 the user's input (one message, no traceback); 1 our fault (with a traceback); 3 the run stopped
itself; 130 and 143 interrupted; 141 the reader of our output went away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import ConfigError, SurogateError

if TYPE_CHECKING:
    from ..config.load import Mode

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
TERMINATED: Final = 143

HELP = """LLM training through a planned program.

Start with `surogate plan run.yaml`: memory and speed of a run, before it starts. Then `surogate train run.yaml`.
"""


class VerbGroup(TyperGroup):
    """Turns errors and results into exit codes, and adds the verbs of installed plugins."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The interpreter flushes stdout once more at exit: give it somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except SurogateError as error:
            if error.exit_code == 1:
                raise
            from .render import print_error, print_traceback

            hint = print_traceback(error)
            print_error(f"{error}{hint}")
            raise typer.Exit(error.exit_code) from None
        raise typer.Exit(result if isinstance(result, int) else 0)

    def list_commands(self, ctx: Any) -> list[str]:
        from .external import external_verbs

        return [*super().list_commands(ctx), *sorted(external_verbs())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The core's own command, or for a plugin's verb a stand-in that help can list without an import."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        from .external import external_verbs, stand_in

        verb = external_verbs().get(cmd_name)
        return stand_in(verb) if verb else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from .external import CORE_VERBS, external_verbs, load_verb

        if args and args[0] not in CORE_VERBS and (verb := external_verbs().get(args[0])):
            return args[0], load_verb(verb), args[1:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=VerbGroup,
    help=HELP,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="PATH", help="The same, as an option.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file. May be repeated.")
]
CheckFiniteOption = Annotated[
    bool, typer.Option("--check-finite", help="Name the first op that writes NaN or inf, and stop.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SftOption = Annotated[bool, typer.Option("--sft", help="Take the defaults of `surogate sft`: train an adapter.")]
PtOption = Annotated[bool, typer.Option("--pt", help="Take the defaults of `surogate pt`.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"surogate {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself. Without a verb: help on stderr and exit 2."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(2)


@app.command(help="Train a model as the YAML file says.")
def train(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    check_finite: CheckFiniteOption = False,
) -> int:
    return _train(ctx, path, config, overrides, check_finite, "train")


@app.command(help="Train with the defaults for pre-training on plain text.")
def pt(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    check_finite: CheckFiniteOption = False,
) -> int:
    return _train(ctx, path, config, overrides, check_finite, "pt")


@app.command(help="Train with the defaults for supervised fine-tuning.")
def sft(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    check_finite: CheckFiniteOption = False,
) -> int:
    return _train(ctx, path, config, overrides, check_finite, "sft")


@app.command(help="Tell memory and time of a run before it starts.")
def plan(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="Plan for h200, say. Default: what a run here would train on, GPU or CPU."
        ),
    ] = None,
    as_json: JsonOption = False,
    listing: Annotated[bool, typer.Option("--listing", help="Print the programs, op by op.")] = False,
) -> int:
    config_path, mode = _config_path(ctx, path, config), _mode(sft, pt)
    from .plan import plan_command

    _print_notices()
    return plan_command(config_path, overrides or [], device, as_json, listing, mode=mode)


@app.command(help="Write the model that a trained adapter makes of its base.")
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of the adapter.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to write the model to, empty or new.")],
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="MODEL", help="Directory or hub id. Default: what the adapter names."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Set aside a model that OUTPUT holds; without this it must be empty.")
    ] = False,
    kind: Annotated[
        str | None,
        typer.Option("--adapter", metavar="NAME", help="Kind of adapter. Default: the one whose file is there."),
    ] = None,
) -> int:
    from .merge import merge_command

    _print_notices()
    return merge_command(adapter, output, base, overwrite, kind)


@app.command(help="Tokenize and check the data of a run, into the cache that training reads.")
def tokenize(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the first rows: trained, masked, padding.")] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="With --debug: how many rows.")] = 3,
) -> int:
    config_path, mode = _config_path(ctx, path, config), _mode(sft, pt)
    from .tokenize import tokenize_command

    _print_notices()
    return tokenize_command(config_path, overrides or [], rows if debug else 0, mode=mode)


@app.command(help="Compare the run's model and recipe with transformers, layer by layer.")
def verify(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    rows: Annotated[int, typer.Option("--rows", min=1, max=64, metavar="N", help="Rows to compare.")] = 2,
    length: Annotated[
        int | None,
        typer.Option("--length", min=16, metavar="N", help="Tokens of a row. Default: sequence_len, at most 512."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, metavar="N", help="Only the model's first N layers.")
    ] = None,
    random_tokens: Annotated[
        bool, typer.Option("--random-tokens", help="Not the run's data, which is the default where there is any.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    config_path, mode = _config_path(ctx, path, config), _mode(sft, pt)
    from .verify import verify_command

    _print_notices()
    return verify_command(config_path, overrides or [], rows, length, layers, random_tokens, as_json, mode=mode)


@app.command(help="Time the run's own step op by op, on the device that it would use.")
def profile(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps to time.")] = 5,
    top: Annotated[int, typer.Option("--top", min=0, metavar="N", help="Longest ops to list.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the profile as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw measured and planned time by kind of op.")
    ] = None,
    random_tokens: Annotated[
        bool, typer.Option("--random-tokens", help="Not the run's data, which is the default where there is any.")
    ] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Do not read the checkpoint.")] = False,
) -> int:
    config_path, mode = _config_path(ctx, path, config), _mode(sft, pt)
    from .profile import profile_command

    _print_notices()
    return profile_command(
        config_path,
        overrides or [],
        steps=steps,
        top=top,
        json_file=json_file,
        picture=picture,
        random_tokens=random_tokens,
        random_weights=random_weights,
        mode=mode,
    )


@app.command(help="List installed plugins and what each provides.")
def plugins(as_json: JsonOption = False) -> int:
    from .plugins import plugins_command

    return plugins_command(as_json)


@app.command(help="Look at this machine: versions, memory, GPUs.")
def doctor(as_json: JsonOption = False) -> int:
    from .doctor import doctor_command

    return doctor_command(as_json)


def _train(
    ctx: typer.Context,
    path: Path | None,
    config: Path | None,
    overrides: list[str] | None,
    check_finite: bool,
    mode: Mode,
) -> int:
    config_path = _config_path(ctx, path, config)
    from .train import train_command

    _print_notices()
    return train_command(config_path, [*(overrides or []), *(["check_finite=true"] if check_finite else [])], mode)


def _config_path(ctx: typer.Context, path: Path | None, option: Path | None) -> Path:
    """The file, given either way. Without one: help on stderr and exit 2."""
    if path is not None and option is not None and path != option:
        raise ConfigError(f"two config files: {path} and --config {option}. Give one")
    chosen = path or option
    if chosen is None:
        typer.echo(ctx.get_help(), err=True)
        typer.echo(f"\nNo config file. Give one: surogate {ctx.info_name} run.yaml", err=True)
        raise typer.Exit(2)
    return chosen


def _mode(sft: bool, pt: bool) -> Mode:
    """The verb whose defaults a run is looked at with."""
    if sft and pt:
        raise ConfigError("--sft and --pt: the defaults of one verb at a time. Give one")
    return "sft" if sft else "pt" if pt else "train"


def _print_notices() -> None:
    """One line on stderr for each plugin that did not load: a run that needs it will say so, others go on."""
    from ..plugins.discovery import load_registry
    from .render import print_warning

    for notice in load_registry().notices:
        print_warning(notice)


def main() -> None:
    """The `surogate` script. Always leaves by SystemExit, or by an exception that is our fault.

    SIGTERM unwinds like Ctrl-C, so that half-written files are removed. SIGUSR1, which asks a run to save, ends nothing
    before its first step and after its last. A library may swallow what a signal raises while it is imported, and fail
    later for that reason: the process then ends as the signal asked for.
    """
    signalled: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signalled.append(INTERRUPTED)
        raise KeyboardInterrupt

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        signalled.append(TERMINATED)
        raise SystemExit(TERMINATED)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, _nothing_to_save),
    }
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        app(prog_name="surogate")
    except BaseException as error:
        if "surogate_core.runtime.threads" in sys.modules:
            from ..runtime.threads import leave_if_stuck

            leave_if_stuck(error)
        if signalled and isinstance(error, Exception):
            raise SystemExit(signalled[-1]) from None
        raise
    finally:
        if "surogate_core.machine.timing" in sys.modules:
            from ..machine.timing import print_phases

            print_phases()
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # os.write, since a signal may come in the middle of a print
        os.write(2, b"\nSIGUSR1: no steps are being taken, so there is nothing to save\n")
