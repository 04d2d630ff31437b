"""`surogate profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surogate.cli.json_output import JsonOption
from surogate.cli.options import (
    ConfigArgument,
    ConfigOption,
    PtOption,
    SetOption,
    SftOption,
    mode_of,
    print_notices,
    run_arguments,
    say_at_work,
)
from surogate_core.plugins.versions import refuse_other_program


def profile(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Steps to time.")] = 5,
    top: Annotated[int, typer.Option("--top", min=0, metavar="N", help="Longest ops to list.")] = 10,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw measured and planned time by kind of op.")
    ] = None,
    random_tokens: Annotated[
        bool, typer.Option("--random-tokens", help="Not the run's data, which is the default where there is any.")
    ] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Do not read the checkpoint.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Time the run's own step op by op, on the device that it would use.

    Examples:
    surogate profile run.yaml
    surogate profile run.yaml --steps 10 --picture step.png
    """
    refuse_other_program("surogate-profile")
    say_at_work(ctx)
    arguments = run_arguments(ctx, path, config, overrides, mode_of(sft, pt))
    from .report import profile_command

    print_notices(arguments)
    return profile_command(
        arguments,
        steps=steps,
        top=top,
        as_json=as_json,
        picture=picture,
        random_tokens=random_tokens,
        random_weights=random_weights,
    )
