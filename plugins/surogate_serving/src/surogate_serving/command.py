"""`surogate check-serving`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from surogate.cli.json_output import JsonOption, print_json
from surogate.cli.options import BaseOption, RunOption
from surogate_core.errors import ConfigError
from surogate_core.plugins.versions import refuse_other_program


def check_serving(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Address of the server, such as http://127.0.0.1:8000, or a folder of files."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--run", metavar="OUTPUT", help="Output of the run, or its adapter or merged model.")
    ],
    rows: Annotated[
        Path | None,
        typer.Option("--rows", metavar="FILE", help="Conversations to compare. Default: validation data of the run."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="MODEL", help="Name of the model. Default: the only one served.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="NAME", help="Name of a served adapter, which is compared.")
    ] = None,
    served_format: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Form that is served: bf16, fp8-channel. Default: as written."),
    ] = None,
    conversations: Annotated[
        int, typer.Option("--conversations", min=1, metavar="N", help="Number of conversations to compare.")
    ] = 16,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Time to wait for a server that starts, or an answer.")
    ] = 120.0,
    log_probs: Annotated[
        bool, typer.Option("--log-probs/--no-log-probs", help="Compare log probabilities, which loads the model.")
    ] = True,
    base: BaseOption = None,
    config: RunOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare what a server computes with the model that was trained.

    Examples:
    surogate check-serving http://127.0.0.1:8000 --run output
    surogate check-serving http://127.0.0.1:8000 --run output --adapter NAME
    """
    refuse_other_program("surogate-serving")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ConfigError(f"--timeout {timeout}: is no time. Give seconds, such as 120.")
    from .checking import Request, check  # imports torch
    from .report import all_equal, as_text
    from .report import as_json as as_data

    checked = check(
        Request(
            url=url,
            output=output,
            rows=rows,
            name=name,
            adapter=adapter,
            format=served_format,
            conversations=conversations,
            timeout=timeout,
            log_probs=log_probs,
            base=base,
            config=config,
        )
    )
    if as_json:
        print_json(as_data(checked.results, {"program": checked.program, "model": checked.model}))
    else:
        print(f"{checked.program}, model {checked.model}")
        print(as_text(checked.results))
    return 0 if all_equal(checked.results) else 1
