"""The commands with which a model writes text, and their options. What they do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .json_output import JsonOption
from .options import BaseOption, print_notices, say_at_work

FolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER", help="Output of a run, checkpoint, model, or adapter, which is loaded on its base."
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System message in front of each conversation.")
]
TemperatureOption = Annotated[
    float,
    typer.Option("--temperature", min=0, metavar="T", help="0: always the most likely token. Higher: more varied."),
]
TopPOption = Annotated[
    float, typer.Option("--top-p", min=0, max=1, metavar="P", help="Draw from the likeliest tokens of this share.")
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Of the draws: the same seed, the same text.")
]


def generate(
    ctx: typer.Context,
    folder: FolderArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="What to answer. Repeatable.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="File of prompts: one a line, or rows (.jsonl, .json) with `prompt` or `messages`; - is stdin.",
        ),
    ] = None,
    system: SystemOption = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer by the chat template, or continue the text. Default: by the template if the folder has one.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Longest answer, in tokens.")
    ] = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", min=1, metavar="N", help="Answer N prompts at once, instead of streaming each."),
    ] = 1,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> int:
    say_at_work(ctx)
    print_notices()
    from ..generation.answers import Sampling
    from .generate import Request, generate_command

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    request = Request(folder, base, prompt or [], file, system, chat, sampling, batch_size)
    return generate_command(request, as_json=as_json)


def chat(
    folder: FolderArgument,
    system: SystemOption = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE", help="JSON list of the tools that the model may call, as schemas."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Longest answer, in tokens.")
    ] = 2048,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    base: BaseOption = None,
) -> int:
    print_notices()
    from ..generation.answers import Sampling
    from .chat import chat_command

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return chat_command(folder, base, system, tools, sampling)
