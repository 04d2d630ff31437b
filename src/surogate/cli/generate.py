"""`surogate generate`: answers of a trained model, on stdout as they are written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry

from ..generation.answers import Answer, Asked, Sampling, checked, load
from ..generation.calls import Call, CallForm, call_form
from ..generation.model_files import ModelFiles, find_files
from ..generation.prompts import Prompt, line_prompts, prompt_ids, read_prompts
from .json_output import print_json
from .render import paint, print_warning
from .written_text import written_text


@dataclass(frozen=True)
class Request:
    """Arguments of `generate`. chat: None: by the chat template, if the folder has one. Answers of one at a time appear
    as they are written."""

    folder: str
    base: str | None
    prompts: Sequence[str]
    file: Path | None
    system: str | None
    chat: bool | None
    sampling: Sampling
    batch_size: int = 1


def generate_command(request: Request, *, as_json: bool) -> int:
    """Print the answers. All prompts are read and measured before the model is loaded."""
    sampling, prompts = checked(request.sampling), _prompts(request)
    files = find_files(request.folder, load_registry(), request.base, print_warning)
    chat = files.tokenizer.chat_template is not None if request.chat is None else request.chat
    if request.system is not None and not chat:
        raise ConfigError("--system: is a message of a conversation, and this continues texts. Leave it out.")
    given = [prompt_ids(prompt, files.tokenizer, chat=chat, system=request.system) for prompt in prompts]
    for prompt, ids in zip(prompts, given, strict=True):
        files.room(len(ids), sampling.max_new_tokens, prompt.where)
    forms = [_form(files, prompt) if chat else None for prompt in prompts]
    asked = [
        Asked(ids=ids, where=prompt.where, visible=visible_ids(files, form))
        for prompt, ids, form in zip(prompts, given, forms, strict=True)
    ]
    model, stops, answers = load(files), files.stops(chat=chat), []
    together: list[Answer] = []
    for place, (prompt, form) in enumerate(zip(prompts, forms, strict=True)):
        if request.batch_size > 1 and not together:
            together = model.answer_batch(asked[place : place + request.batch_size], sampling, stops)
        if not as_json and len(prompts) > 1:
            print(paint(f"# {prompt.where}: {written_text(prompt.shown)}", "dim"))
        shows = not as_json and form is None and not together
        if together:
            answer = together.pop(0)
        else:
            of, print_piece = asked[place], _print if shows else _nothing
            answer = model.answer(of.ids, sampling, stops, of.where, print_piece, visible=of.visible)
        text, calls = form.read(answer.text) if form else (answer.text, [])
        answers.append(_as_data(prompt, answer, text, calls))
        if not as_json:
            print("" if shows else _shown(text, calls))
            if answer.finish == "length":
                note = f"{prompt.where}: cut after {len(answer.tokens):,} tokens, before the model ended its answer"
                print(note, file=sys.stderr)
    if as_json:
        settings = {**asdict(sampling), "chat": chat, "device": str(model.model.device)}
        print_json({"model": files.model_dir, "adapter": files.adapter_dir, "settings": settings, "answers": answers})
    return 0


def _prompts(request: Request) -> list[Prompt]:
    several = len(request.prompts) > 1
    named = (f"prompt {number}" if several else "--prompt" for number in range(1, len(request.prompts) + 1))
    found = [Prompt(text, where=where) for text, where in zip(request.prompts, named, strict=True)]
    if request.file is not None:
        found += _stdin() if str(request.file) == "-" else read_prompts(request.file)
    if not found:
        raise ConfigError("no prompt: give --prompt TEXT, or --file FILE (- is stdin).")
    return found


def _stdin() -> list[Prompt]:
    found = list(line_prompts(sys.stdin, "stdin"))
    if not found:
        raise ConfigError("stdin: holds no prompt. Write one a line.")
    return found


def _form(files: ModelFiles, prompt: Prompt) -> CallForm | None:
    template = files.tokenizer.chat_template
    return call_form(template, prompt.tools) if template is not None and prompt.tools else None


def visible_ids(files: ModelFiles, form: CallForm | None) -> Sequence[int]:
    """Return the tokens in front of a call, which may be special ones."""
    return files.tokenizer.encode_ids(form.marker) if form else ()


def _nothing(text: str) -> None:
    """Print it when all of it is there."""


def _print(text: str) -> None:
    print(written_text(text), end="", flush=True)


def _shown(text: str, calls: Sequence[Call]) -> str:
    return "\n".join([*([written_text(text)] if text else []), *(f"call {written_text(str(call))}" for call in calls)])


def _as_data(prompt: Prompt, answer: Answer, text: str, calls: Sequence[Call]) -> dict[str, object]:
    return {
        "prompt": prompt.text if not prompt.messages else None,
        "messages": prompt.messages or None,
        "text": text,
        "calls": calls,
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": len(answer.tokens),
        "seconds": answer.seconds,
    }
