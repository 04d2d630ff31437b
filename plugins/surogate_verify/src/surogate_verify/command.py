"""`surogate verify`."""

from __future__ import annotations

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


def verify(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    rows: Annotated[int, typer.Option("--rows", min=1, max=64, metavar="N", help="Number of rows to compare.")] = 2,
    length: Annotated[
        int | None,
        typer.Option("--length", min=16, metavar="N", help="Tokens per row. Default: sequence_len, at most 512."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, metavar="N", help="Compare only the model's first N layers.")
    ] = None,
    random_tokens: Annotated[
        bool, typer.Option("--random-tokens", help="Use random tokens instead of the run's data.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Compare model and recipe with transformers, layer by layer.

    Examples:
    surogate verify run.yaml
    surogate verify run.yaml --rows 1 --length 128
    """
    refuse_other_program("surogate-verify")
    say_at_work(ctx)
    arguments = run_arguments(ctx, path, config, overrides, mode_of(sft, pt))
    from .report import verify_command  # imports torch
    from .verification import Extent

    print_notices(arguments)
    return verify_command(arguments, Extent(rows, length, layers, random_tokens), as_json=as_json)
