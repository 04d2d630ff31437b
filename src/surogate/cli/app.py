"""The commands of `surogate` and their options. The module of a command is imported when the command runs."""

from __future__ import annotations

import gc
import io
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from surogate_core.errors import ConfigError, RunStopped

from ..reporting.terminal import failure_of
from . import signals
from .command_group import CommandGroup
from .examples import examples
from .json_output import JsonOption, print_json
from .options import (
    BaseOption,
    CheckFiniteOption,
    ConfigArgument,
    ConfigOption,
    DeviceOption,
    FitOption,
    GpusOption,
    HtmlOption,
    KindOption,
    NodesOption,
    OverwriteOption,
    PtOption,
    RunOption,
    SetOption,
    SftOption,
    mode_of,
    print_notices,
    run_arguments,
    say_at_work,
)
from .render import print_error
from .text_commands import chat, generate

HELP = """Pre-train and fine-tune LLMs.

`surogate plan run.yaml` shows the memory and speed of a run. `surogate train run.yaml` trains.
"""

app = typer.Typer(
    cls=CommandGroup,
    help=HELP,
    epilog=examples("plan run.yaml", "train run.yaml", "docs quickstart"),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from surogate_core import __version__

        typer.echo(f"surogate {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself. Without a command: print help on stderr and exit with 2."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(2)


def _add_training(mode: Literal["train", "pt", "sft"], summary: str) -> None:
    @app.command(
        mode, help=summary, epilog=examples(f"{mode} run.yaml", f"{mode} run.yaml --fit auto --set max_steps=100")
    )
    def train(
        ctx: typer.Context,
        path: ConfigArgument = None,
        config: ConfigOption = None,
        overrides: SetOption = None,
        check_finite: CheckFiniteOption = False,
        fit: FitOption = None,
        as_json: JsonOption = False,
    ) -> int:
        arguments = run_arguments(ctx, path, config, overrides, mode)
        from .train import train_command

        print_notices(arguments)
        if check_finite:
            arguments.overrides.append("check_finite=true")
        return train_command(arguments, fit, as_json=as_json)


_add_training("train", "Train a model as the YAML file says.")
_add_training("pt", "Train with the defaults for pre-training on plain text.")
_add_training("sft", "Train with the defaults for supervised fine-tuning.")


@app.command(
    help="Show the memory and time of a run before it starts.",
    epilog=examples(
        "plan run.yaml",
        "plan run.yaml --sft --device rtx4090",
        "plan run.yaml --fit 24GiB",
        "plan run.yaml --longest --device h100",
        "plan run.yaml --html plan.html",
    ),
)
def plan(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    device: DeviceOption = None,
    gpus: GpusOption = None,
    nodes: NodesOption = 1,
    fit: FitOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    listing: Annotated[bool, typer.Option("--listing", help="Print the programs, op by op.")] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="The longest row that fits: adapters on bases of each size, all weights.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with code 1 if the run does not fit.")] = False,
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="PASS", help="Print only what a pass changes in the programs.")
    ] = None,
    all_blocks: Annotated[bool, typer.Option("--all", help="With --diff: also blocks that are alike.")] = False,
) -> int:
    say_at_work(ctx)
    arguments = run_arguments(ctx, path, config, overrides, mode_of(sft, pt))
    from .plan import Machines, diff_command, fit_command, longest_command, plan_command

    print_notices(arguments)
    machines = Machines(device, gpus, nodes)
    if longest:
        other = {"--fit": fit is not None, "--listing": listing, "--check": check, "--html": html, "--diff": diff}
        if given := [option for option, chosen in other.items() if chosen]:
            raise ConfigError(f"--longest and {given[0]}: --longest prints a table of several plans. Give one")
        return longest_command(arguments, machines, as_json=as_json)
    if listing and (fit is not None or as_json):
        raise ConfigError(f"{'--json' if as_json else '--fit'} and --listing: a listing is text of one plan. Give one")
    if diff is not None:
        other = {"--fit": fit is not None, "--json": as_json, "--listing": listing, "--check": check, "--html": html}
        if given := [option for option, chosen in other.items() if chosen]:
            raise ConfigError(f"--diff and {given[0]}: --diff prints nothing but a diff. Give one")
        return diff_command(arguments, machines, diff, all_blocks=all_blocks)
    if all_blocks:
        raise ConfigError("--all: is of a diff. Add --diff PASS")
    if fit is not None and html is not None:
        raise ConfigError(
            "--fit and --html: a page is of one plan. Set what a proposal says with --set, then give --html"
        )
    if fit is not None:
        return fit_command(arguments, fit, machines, as_json=as_json, check=check)
    return plan_command(arguments, machines, as_json=as_json, listing=listing, check=check, html=html)


@app.command(
    help="Write a finished model in the files that servers and other programs load.",
    epilog=examples(
        "export output/step_00000100 model", "export output served --format fp8-channel", "export ADAPTER served"
    ),
)
def export(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER", help="Output of a run, checkpoint, model, or adapter, which is merged on the way."
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="New or empty folder for the model.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME[:TYPE]",
            help="Form of the files; `surogate plugins` lists those that are installed. hf is that of transformers.",
        ),
    ] = "hf",
    base: BaseOption = None,
    overwrite: OverwriteOption = False,
    kind: KindOption = None,
    config: RunOption = None,
    as_json: JsonOption = False,
) -> int:
    from .. import run

    print_notices()
    run.export(folder, output, overwrite, format=format, base=base, adapter=kind, config=config)
    print(f"exported {folder}: {output}")
    if as_json:
        print_json({"checkpoint": folder, "output": output, "format": format})
    return 0


@app.command(
    help="Merge a trained adapter into its base model.",
    epilog=examples("merge output/adapter merged"),
)
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of the adapter.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="New or empty folder for the model.")],
    base: BaseOption = None,
    overwrite: OverwriteOption = False,
    kind: KindOption = None,
    config: RunOption = None,
    as_json: JsonOption = False,
) -> int:
    from .. import run

    print_notices()
    base_dir = run.merge(adapter, output, base, overwrite, kind, config=config)
    print(f"merged {adapter} into {base_dir}: {output}")
    if as_json:
        print_json({"adapter": adapter, "base": base_dir, "output": output})
    return 0


@app.command(
    help="Write a model with its matrices in a weight format, which a key selects.",
    epilog=examples("quantize MODEL OUTPUT --set KEY=true"),
)
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="New or empty folder for the model.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Required: KEY=true of a weight format. Without it an error names them. Repeatable.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> int:
    from .. import run

    print_notices()
    model_dir = run.quantize(model, output, overrides or [], overwrite)
    print(f"quantized {model_dir}: {output}")
    if as_json:
        print_json({"model": model_dir, "output": output})
    return 0


@app.command(
    help="Tokenize, check and cache the data of a run.",
    epilog=examples(
        "tokenize run.yaml --debug", "tokenize run.yaml --at chats.jsonl:7", "tokenize run.yaml --html data.html"
    ),
)
def tokenize(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show documents of each entry.")] = False,
    at: Annotated[
        str | None, typer.Option("--at", metavar="FILE:LINE", help="Show only this row; its place as messages name it.")
    ] = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> int:
    arguments = run_arguments(ctx, path, config, overrides, mode_of(sft, pt))
    from .tokenize import show_row, tokenize_command

    print_notices(arguments)
    if at is not None and debug:
        raise ConfigError("--at and --debug: --at shows one row, and all of it. Give one")
    if at is not None and html is not None:
        raise ConfigError("--at and --html: a page shows the data of a run, not one row. Give one")
    if at is not None:
        return show_row(arguments, at, as_json=as_json)
    return tokenize_command(arguments, debug, as_json=as_json, html=html)


@app.command(
    help="Show what a run has come to, and as a page: its curves, what stands out, memory, and another run beside it.",
    epilog=examples("report output", "report output --html report.html", "report output other --html both.html"),
)
def report(
    folder: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Output folder of a run, also while it trains.")],
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="That of a run to compare it with.")] = None,
    html: HtmlOption = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Show the times that `surogate profile --json` measured."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    from .report import report_command

    return report_command(folder, other, html, profile, as_json=as_json)


app.command(
    help="Answer prompts with a trained model.",
    epilog=examples(
        'generate output --prompt "Why is the sky blue?"', "generate output/adapter --file prompts.txt --json"
    ),
)(generate)
app.command(
    help="Talk to a trained model in the terminal.",
    epilog=examples("chat output", 'chat output/adapter --system "Answer in one sentence." --temperature 0.7'),
)(chat)


@app.command(
    help="List installed plugins and what each provides.",
    epilog=examples("plugins", "plugins --config run.yaml"),
)
def plugins(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="PATH", help="Also list the files that this YAML file names.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    from .plugins import plugins_command

    return plugins_command(config, as_json)


@app.command(
    help="Print the JSON Schema of configs with the installed plugins, for editors.",
    epilog=examples("schema > surogate.schema.json", "schema --config run.yaml > run.schema.json"),
)
def schema(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="PATH", help="Also keys of the files that this YAML file names.")
    ] = None,
) -> int:
    import json

    from surogate_core.plugins.discovery import load_registry

    from ..config.json_schema import config_schema
    from ..config.plugin_files import plugin_files, read_run

    registry = load_registry(files=plugin_files(read_run(config, ())) if config else ())
    print(json.dumps(config_schema(registry), indent=1))
    return 0


@app.command(
    help="Check this machine: versions, memory, GPUs.",
    epilog=examples("doctor", "doctor --measure"),
)
def doctor(
    as_json: JsonOption = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the rates of this machine's GPU, for later plans: 30 s.")
    ] = False,
) -> int:
    from .doctor import doctor_command, measure_command

    return measure_command(as_json) if measure else doctor_command(as_json)


def main() -> None:
    """The `surogate` script. Always leaves by SystemExit, or by an exception that is an error in our code."""
    gc.set_threshold(1_000_000)  # imports and plans make objects that stay: collections take a sixth of a start
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal may have fewer characters than texts
    with signals.told(), signals.handled():
        try:
            app(prog_name="surogate")
        except BaseException as error:
            if isinstance(error, OSError) and (reason := failure_of(sys.stdout)):
                print_error(f"stdout: cannot be written: {reason}. Write it elsewhere.")
                raise SystemExit(RunStopped.exit_code) from None
            if "surogate_core.runtime.threads" in sys.modules:
                from surogate_core.runtime.threads import leave_if_stuck

                leave_if_stuck(error)
            raise
        finally:
            if "surogate_core.machine.timing" in sys.modules:
                from surogate_core.machine.timing import print_phases

                print_phases()
