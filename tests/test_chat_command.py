"""`surogate chat`: what is said, kept and saved. Ctrl-C ends an answer, not the conversation."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_formats import published_tokenizer
from end_to_end.product import COMMAND, assert_refused, environment, invoke
from typer.testing import CliRunner
from written_model import write_weights

from surogate.cli import chat as command
from surogate.cli.app import app
from surogate.cli.chat import Chat
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.generation.answers import Answer, Sampling, StreamedText
from surogate_core.errors import ConfigError

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]


class Said:
    """Stands for a tensor of tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = [*ids]

    def reshape(self, size: int) -> Said:
        return self

    def tolist(self) -> list[int]:
        return self._ids


class Scripted:
    """A model that answers with texts, in order, streamed token by token as a real one is. asked: its prompts."""

    def __init__(self, tokenizer: RowTokenizer, *texts: str) -> None:
        self.tokenizer, self.files, self._texts, self.asked = tokenizer, self, list(texts), list[str]()

    def stops(self, *, chat: bool) -> list[int]:
        return []

    def answer(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        stops: Sequence[int],
        where: str,
        on_text: Any,
        stopped: Any,
        seeded: bool,
        visible: Sequence[int],
    ) -> Answer:
        self.asked.append(self.tokenizer.decode(ids))
        stream = StreamedText(self.tokenizer, on_text, visible)
        stream.put(Said(ids))
        for token in self.tokenizer.encode_ids(self._texts.pop(0)):
            stream.put(Said([token]))
            if stopped():
                break
        stream.end()
        return Answer(stream.text, stream.tokens, len(ids), "interrupted" if stopped() else "stop", 0.0)


def chat_of(folder: Path, template: str, *texts: str, **how: Any) -> tuple[Chat, Scripted, list[str]]:
    published_tokenizer(folder / "tokenizer", template)
    said, model = list[str](), Scripted(RowTokenizer(folder / "tokenizer"), *texts)
    return Chat(model, Sampling(max_new_tokens=9), say=said.append, **how), model, said  # type: ignore[arg-type]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_model_reads_the_whole_conversation_as_its_template_writes_it(tmp_path: Path) -> None:
    chat, model, said = chat_of(tmp_path, "qwen3", "Hello.", "Again?", system="Be brief.")
    chat.ask(user("Hi"))
    chat.ask(user("Hi again"))
    assert "".join(said) == "Hello.Again?" and len(said) > 4
    template = model.tokenizer.chat_template
    assert template is not None
    before = [{"role": "system", "content": "Be brief."}, user("Hi"), {"role": "assistant", "content": "Hello."}]
    assert model.asked[1] == template.render([*before, user("Hi again")], prompt=True)


@pytest.mark.parametrize("template", ["qwen3", "mistral-v3"])
def test_a_call_is_shown_as_one_and_waits_for_its_result(tmp_path: Path, template: str) -> None:
    wanted = {"name": "weather", "arguments": {"city": "Oslo"}}
    written = {
        "qwen3": f"Let me see.\n<tool_call>\n{json.dumps(wanted)}\n</tool_call>",
        "mistral-v3": f"[TOOL_CALLS] [{json.dumps(wanted)}]",
    }[template]
    chat, model, said = chat_of(tmp_path, template, written, "It rains.", tools=TOOLS)
    chat.ask(user("Weather in Oslo?"))
    text = "".join(said)
    assert 'call weather(city="Oslo")' in text and "TOOL_CALLS" not in text and "<tool_call>" not in text
    assert text.startswith("Let me see.") == (template == "qwen3")
    result = chat.tool_result("rain")
    assert not chat.waits_for_more(result)
    chat.ask(result)
    assert "rain" in model.asked[1] and '"city": "Oslo"' in model.asked[1]
    with pytest.raises(ConfigError, match="the model has called nothing"):
        chat.tool_result("rain")


def test_a_saved_conversation_is_a_row_of_a_dataset(tmp_path: Path) -> None:
    chat, model, _ = chat_of(tmp_path, "qwen3", "Hello.", system="Be brief.")
    file = tmp_path / "chats.jsonl"
    with pytest.raises(ConfigError, match="nothing has been said"):
        chat.save(file)
    chat.ask(user("Hi"))
    chat.save(file)
    chat.save(file)
    first, second = map(json.loads, file.read_text().splitlines())
    assert first == second and [m["role"] for m in first["messages"]] == ["system", "user", "assistant"]
    encoded = model.tokenizer.encode_conversation(first)
    assert "Hello." in model.tokenizer.decode([t for t, on in zip(encoded.tokens, encoded.trained, strict=True) if on])
    with pytest.raises(ConfigError, match="cannot write"):
        chat.save(tmp_path / "none" / "chats.jsonl")
    (tmp_path / "step_00000001.partial").mkdir()
    with pytest.raises(ConfigError, match="a checkpoint"):
        chat.save(tmp_path / "step_00000001.partial" / "chats.jsonl")


def test_answers_that_were_cut_are_saved_and_not_trained(tmp_path: Path) -> None:
    stops = [True]
    chat, model, _ = chat_of(tmp_path, "qwen3", "Hello there.", "Fine.", stopped=lambda: stops[0])
    chat.ask(user("Hi"))
    stops[0] = False
    chat.ask(user("How are you?"))
    file = tmp_path / "chats.jsonl"
    assert chat.save(file) == 1
    (row,) = map(json.loads, file.read_text().splitlines())
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]
    encoded = model.tokenizer.encode_conversation(row)
    trained = model.tokenizer.decode([t for t, on in zip(encoded.tokens, encoded.trained, strict=True) if on])
    assert "Fine." in trained and "He" not in trained
    assert "weight" not in model.asked[-1]


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(tmp_path: Path) -> None:
    chat, model, _ = chat_of(tmp_path, "mistral-v3", "Hello.")
    chat.ask(user("Hi"))
    with pytest.raises(ConfigError, match="refuses these messages"):
        chat.ask({"role": "assistant", "content": "no turn of the user"})
    assert len(chat.messages) == 2 and len(model.asked) == 1


def test_control_characters_are_escaped_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _, said = chat_of(tmp_path, "qwen3", "a\x1b[2Jb\tc\n", "a\x1bb")
    chat.ask(user("Hi"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    chat.ask(user("Hi"))
    assert "".join(said) == "a\x1b[2Jb\tc\na\\x1bb"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tools", "none.json"], "--tools none.json: cannot be read"),
        (["--tools", "empty.json"], "--tools empty.json: holds no tools"),
        (["--tools", "wrong.json"], "wrong.json: column 'tools' holds"),
        (["--tools", "tools.json"], "writes no calls. Leave it out"),
        (["--temperature", "inf"], "is no temperature"),
    ],
)
def test_what_a_chat_cannot_begin_with_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "wrong.json").write_text('{"a": 1}')
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    monkeypatch.setattr(command, "load", lambda files: pytest.fail("loaded"))
    assert_refused(invoke("chat", write_weights(tmp_path / "model"), *words), said)


def test_a_folder_without_a_chat_template_is_told(tmp_path: Path) -> None:
    model = write_weights(tmp_path / "model", template=False)
    assert_refused(invoke("chat", model), "has no chat template", f"surogate generate {model} --raw --prompt TEXT")


def test_lines_of_a_pipe_are_messages_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_weights(tmp_path / "model")
    lines = ["Hi", '"""one', 'two"""', "/system Be brief.", "/save c.jsonl", "Who?", "/reset", "/what", "Again?"]
    lines += ["/save c.jsonl", " ".join(["word"] * 300), "/exit", "not read"]
    words = ["chat", str(model), "--max-new-tokens", "3"]
    done = CliRunner().invoke(app, words, input="\n".join(lines), prog_name="surogate")
    assert done.exit_code == 0, done.stderr
    assert "error: /save: nothing has been said yet" in done.stdout and "error: /what: is no command" in done.stdout
    assert "error: the conversation: has" in done.stdout and "Shorten it" in done.stdout
    (row,) = map(json.loads, (tmp_path / "c.jsonl").read_text().splitlines())
    assert [(m["role"], m["content"]) for m in row["messages"][:2]] == [("system", "Be brief."), ("user", "Again?")]
    assert done.stderr.count("(cut after 3 tokens)") == 4


@pytest.mark.parametrize("last", ['"""one\ntwo', '"""one\ntwo\n', '"""\none\ntwo\n"""'])
def test_the_end_of_a_pipe_ends_a_message_of_several_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    published_tokenizer(tmp_path / "tokenizer", "qwen3")
    model = Scripted(RowTokenizer(tmp_path / "tokenizer"), "It is I.")
    monkeypatch.setattr(command, "find_files", lambda *given: SimpleNamespace(tokenizer=model.tokenizer))
    monkeypatch.setattr(command, "load", lambda files: model)
    done = CliRunner().invoke(app, ["chat", str(tmp_path)], input=last, prog_name="surogate")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "It is I.\n" and "user\none\ntwo<" in model.asked[0]


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(tmp_path: Path) -> None:
    """In a terminal of its own, as a user types."""
    model = write_weights(tmp_path / "model", max_position_embeddings=4096)
    main, other = pty.openpty()
    words = [*COMMAND, "chat", str(model), "--max-new-tokens", "4000"]
    process = subprocess.Popen(
        words, stdin=other, stdout=other, stderr=other, env=environment(tmp_path), start_new_session=True
    )
    os.close(other)
    seen = ""

    def until(pattern: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 90
        while not re.search(pattern, seen) and time.monotonic() < deadline:
            if select.select([main], [], [], 0.2)[0]:
                try:
                    seen += os.read(main, 1 << 16).decode(errors="replace")
                except OSError:
                    break
        assert re.search(pattern, seen), seen[-2000:]

    try:
        until(r">>> ")
        seen = ""
        os.write(main, b"Hi\n")
        until(r"(?s)Hi\r\n.{20}")
        process.send_signal(signal.SIGINT)
        until(r"(?s)\(stopped\).*>>> ")
        time.sleep(0.5)  # until it reads: a signal or a key before that is lost
        seen = ""
        process.send_signal(signal.SIGINT)
        until(r"(?s)Ctrl-D leaves.*>>> ")
        time.sleep(0.5)
        os.write(main, b'"""one\n')
        until(r"\.\.\. $")
        os.write(main, b"\x04")
        until('the message is not sent: """ ends it')
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
