"""`surogate chat`: a conversation with a trained model in the terminal, streamed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from surogate_core.api.destination import refuse_checkpoint
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry

from ..generation.answers import Answer, LoadedModel, Sampling, checked, load
from ..generation.calls import CallForm, call_form, message_of
from ..generation.model_files import ModelFiles, find_files
from ..generation.prompts import Prompt, checked_tools, prompt_ids
from .generate import visible_ids
from .render import paint, print_warning
from .written_text import written_text

HELP: Final = """\
/reset        begin a new conversation, with the same system message
/system TEXT  set the system message, and begin a new conversation; without TEXT: none
/tool TEXT    answer a call of the model with what the tool returns
/save FILE    append the conversation to FILE, as a row of a dataset of type conversation
/exit         leave, as Ctrl-D does
\"\"\"           begin and end a message of several lines
Ctrl-C        stop an answer. What is written stays in the conversation"""
_LINES: Final = '"""'


@dataclass
class Chat:
    """A conversation with a model. say: prints a text as it is given."""

    model: LoadedModel
    sampling: Sampling
    system: str | None = None
    tools: Sequence[Any] | None = None
    say: Callable[[str], None] = print
    stopped: Callable[[], bool] = lambda: False
    messages: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        files = self.model.files
        template = files.tokenizer.chat_template
        assert template is not None, "looked at before the model is loaded"
        self._form: CallForm | None = call_form(template, self.tools) if self.tools else None
        self._stops = files.stops(chat=True)
        self._answers = 0
        self._cut: list[Mapping[str, Any]] = []

    def ask(self, message: Mapping[str, Any]) -> Answer:
        """Add a message, and print and add the answer. Raises ConfigError, with neither added, if there is none."""
        messages = [*self.messages, message]
        prompt = Prompt(messages=messages, tools=self.tools, where="the conversation")
        ids = prompt_ids(prompt, self.model.files.tokenizer, chat=True, system=self.system)
        streamed, said = "", 0

        def on_text(text: str) -> None:
            nonlocal streamed, said
            streamed += text
            certain = self._form.shown(streamed) if self._form else len(streamed)
            self.say(written_text(streamed[said:certain]))
            said = max(said, certain)

        answer = self.model.answer(
            ids,
            self.sampling,
            self._stops,
            prompt.where,
            on_text,
            self.stopped,
            seeded=not self._answers,
            visible=visible_ids(self.model.files, self._form),
        )
        self._answers += 1
        content, calls = self._form.read(answer.text) if self._form else (answer.text, [])
        if calls:
            self.say("".join(f"\n{paint(f'call {written_text(str(call))}', 'yellow')}" for call in calls))
        else:
            self.say(written_text(answer.text[said:]))
        said_by_model = message_of(content, calls)
        if answer.finish != "stop":
            self._cut.append(said_by_model)
        self.messages = [*messages, said_by_model]
        return answer

    def tool_result(self, text: str) -> Mapping[str, Any]:
        """Return the message with the result of the first call that has none. Raises ConfigError if none waits."""
        answered = {message.get("tool_call_id") for message in self._since_call()}
        calls = [call for message in self._since_call() for call in message.get("tool_calls") or ()]
        waiting = next((call for call in calls if call["id"] not in answered), None)
        if waiting is None:
            raise ConfigError("/tool: the model has called nothing. Start with --tools FILE, and ask for what they do.")
        return {"role": "tool", "content": text, "tool_call_id": waiting["id"], "name": waiting["function"]["name"]}

    def waits_for_more(self, result: Mapping[str, Any]) -> bool:
        """Return whether calls of the last answer wait for results after this one."""
        given = {result["tool_call_id"], *(message.get("tool_call_id") for message in self._since_call())}
        return any(call["id"] not in given for m in self._since_call() for call in m.get("tool_calls") or ())

    def _since_call(self) -> Sequence[Mapping[str, Any]]:
        """Return the last answer and the results after it."""
        at = max((i for i, message in enumerate(self.messages) if message["role"] == "assistant"), default=0)
        return self.messages[at:]

    def save(self, path: Path) -> int:
        """Append the conversation to a file, as a row of a dataset, and return how many of its answers were cut.

        Those have a weight of 0: the model has not ended them, and training would have it end there. Raises ConfigError
        if it cannot be written.
        """
        if not self.messages:
            raise ConfigError("/save: nothing has been said yet.")
        refuse_checkpoint(path, "/save: ")
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        cut = [any(message is other for other in self._cut) for message in self.messages]
        said = [{**m, "weight": 0} if is_cut else m for m, is_cut in zip(self.messages, cut, strict=True)]
        row = {"messages": [*system, *said], **({"tools": self.tools} if self.tools else {})}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"/save: cannot write {path}: {error.strerror or error}. Name another file.") from error
        return sum(cut)


def chat_command(folder: str, base: str | None, system: str | None, tools: Path | None, sampling: Sampling) -> int:
    checked(sampling)
    files = find_files(folder, load_registry(), base, print_warning)
    if files.tokenizer.chat_template is None:
        raise ConfigError(
            f"{files.tokenizer_dir}: has no chat template (chat_template.jinja), so it cannot chat. Continue texts "
            f"with it: surogate generate {folder} --raw --prompt TEXT."
        )
    given = _read_tools(tools) if tools is not None else None
    if given and call_form(files.tokenizer.chat_template, given) is None:
        raise ConfigError(f"--tools {tools}: {files.tokenizer.chat_template.where} writes no calls. Leave it out.")
    _refuse_system(files, system)
    stop = _Stop()
    with stop.handled():
        model = load(files)
        chat = Chat(model, sampling, system, given, _say, lambda: stop.asked)
        if sys.stdin.isatty():
            print(f"{files}, on {model.model.device}. /help lists the commands, Ctrl-D leaves.")
        return _converse(chat, stop)


def _refuse_system(files: ModelFiles, system: str | None) -> None:
    """Raise ConfigError, before a model is loaded, for a system message that the template refuses."""
    if system is not None:
        prompt_ids(Prompt("a", where="--system"), files.tokenizer, chat=True, system=system)


def _converse(chat: Chat, stop: _Stop) -> int:
    for line in _messages(stop):
        word, _, rest = line.partition(" ")
        try:
            if word == "/exit":
                return 0
            if word == "/help":
                print(HELP)
            elif word in ("/reset", "/system"):
                _begin_again(chat, rest.strip() or None if word == "/system" else chat.system)
            elif word == "/save":
                _save(chat, rest.strip())
            elif word == "/tool":
                _answer_call(chat, rest, stop)
            elif line.startswith("/") and "/" not in word[1:]:
                raise ConfigError(f"{word}: is no command. /help lists them.")
            else:
                _ask(chat, {"role": "user", "content": line}, stop)
        except ConfigError as error:
            print(f"{paint('error:', 'red')} {error}")
    return 0


def _begin_again(chat: Chat, system: str | None) -> None:
    _refuse_system(chat.model.files, system)
    chat.messages, chat.system = [], system
    print("a new conversation" + ("" if system is None else ", with the system message"))


def _save(chat: Chat, name: str) -> None:
    if not name:
        raise ConfigError("/save: needs the name of a file, such as /save chats.jsonl.")
    cut = chat.save(Path(name).expanduser())
    note = f"; answers that were cut are not trained (weight: 0): {cut}" if cut else ""
    print(f"appended to {name}{note}")


def _answer_call(chat: Chat, text: str, stop: _Stop) -> None:
    """Add the result of a tool. The model goes on when all its calls have one."""
    result = chat.tool_result(text)
    if chat.waits_for_more(result):
        chat.messages = [*chat.messages, result]
    else:
        _ask(chat, result, stop)


def _ask(chat: Chat, message: Mapping[str, Any], stop: _Stop) -> None:
    with stop.answering():
        answer = chat.ask(message)
    print()
    if answer.finish != "stop":
        why = "stopped" if answer.finish == "interrupted" else f"cut after {len(answer.tokens):,} tokens"
        print(paint(f"({why})", "dim"), file=sys.stderr)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _read_tools(path: Path) -> list[Any]:
    try:
        found = checked_tools(path.read_text(encoding="utf-8-sig"), f"--tools {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tools {path}: cannot be read: {error}. Name a JSON file.") from error
    if not found:
        raise ConfigError(f"--tools {path}: holds no tools. Write a JSON list of functions.")
    return found


# ------------------------------------------------------------------------------------------------------------ terminal


def _messages(stop: _Stop) -> Iterator[str]:
    """Yield the messages of the user: lines, or what stands between two of \"\"\"."""
    asks = sys.stdin.isatty()
    if asks:
        with suppress(ImportError):
            import readline  # noqa: F401 (lines can be edited, and earlier ones come back)
    while True:
        try:
            line = _line(">>> ", asks)
            if line.lstrip().startswith(_LINES):
                line = _several(line.lstrip().removeprefix(_LINES), asks)
        except EOFError:
            if asks:
                print()
            return
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D leaves.")
            continue
        if line.strip():
            yield line


def _line(prompt: str, asks: bool) -> str:
    if asks:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _several(first: str, asks: bool) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(_LINES):
        try:
            lines.append(_line("... ", asks))
        except EOFError:
            if asks:
                print(f"\nthe message is not sent: {_LINES} ends it", end="")
                raise
            return "\n".join(lines).strip("\n")  # the end of a pipe ends its last message too
    return "\n".join([*lines[:-1], lines[-1].rstrip().removesuffix(_LINES)]).strip("\n")


class _Stop:
    """Ctrl-C: ends an answer, and else the line that is being typed."""

    def __init__(self) -> None:
        self.asked = self._answering = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answering(self) -> Iterator[None]:
        self.asked, self._answering = False, True
        try:
            yield
        finally:
            self._answering = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._answering:
            raise KeyboardInterrupt
        self.asked = True
