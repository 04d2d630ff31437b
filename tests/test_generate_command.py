"""`surogate generate`: the text is that of transformers and PEFT, and what cannot be answered is told in one line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import assert_refused, invoke
from typer.testing import CliRunner
from written_model import write_adapter, write_weights

from surogate.cli.app import app
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.generation.answers import Sampling, StreamedText, load
from surogate.generation.model_files import find_files
from surogate_core.plugins.discovery import load_registry

SAID = "ROMEO: what light"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), base)


def generated(*words: str | Path) -> dict[str, Any]:
    done = invoke("generate", *words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_transformers(folder: Path, text: str, new: int, *, chat: bool, adapter: Path | None = None, **how: Any) -> str:
    """Return what transformers writes greedily, from its own tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    given = tokenizer(text, return_tensors="pt").input_ids
    if chat:
        asked = [{"role": "user", "content": text}]
        given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(given)
    out = model.eval().generate(given, attention_mask=mask, max_new_tokens=new, do_sample=False, **how)
    return str(tokenizer.decode(out[0, given.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("chat", [True, False])
def test_the_answer_is_that_of_transformers(base: Path, chat: bool) -> None:
    answer = generated(base, "--prompt", SAID, "--max-new-tokens", "12", "--chat" if chat else "--raw")["answers"][0]
    assert answer["text"] == by_transformers(base, SAID, 12, chat=chat)
    assert answer["tokens"] == 12 and answer["finish"] == "length"


def test_an_adapter_answers_on_the_base_that_it_names(base: Path, adapter: Path) -> None:
    found = generated(adapter, "--prompt", SAID, "--max-new-tokens", "8", "--raw")
    assert found["model"] == str(base) and found["adapter"] == str(adapter)
    text = found["answers"][0]["text"]
    assert text == by_transformers(base, SAID, 8, chat=False, adapter=adapter)
    assert text != by_transformers(base, SAID, 8, chat=False)


def test_an_answer_ends_with_what_the_run_has_trained(base: Path, tmp_path: Path) -> None:
    plain = generated(base, "--prompt", SAID, "--max-new-tokens", "6", "--raw", "--temperature", "1")["answers"][0]
    tokenizer = RowTokenizer(base)
    third = [*tokenizer.encode_ids(plain["text"])][2]
    stopping = Path(shutil.copytree(base, tmp_path / "stopping"))
    (stopping / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, third]}))
    words = ("--prompt", SAID, "--max-new-tokens", "6", "--raw", "--temperature", "1")
    cut = generated(stopping, *words)["answers"][0]
    assert cut["finish"] == "stop" and cut["tokens"] <= 3 and plain["text"].startswith(cut["text"])


def test_the_seed_decides_the_text_whatever_came_before(base: Path) -> None:
    words = ("--raw", "--max-new-tokens", "8", "--temperature", "0.9", "--top-p", "0.95", "--seed")
    alone = generated(base, "--prompt", SAID, *words, "3")["answers"]
    second = generated(base, "--prompt", "JULIET:", "--prompt", SAID, *words, "3")["answers"]
    other = generated(base, "--prompt", SAID, *words, "4")["answers"]
    assert second[1]["text"] == alone[0]["text"] != other[0]["text"]


def test_values_of_the_folder_do_not_replace_those_of_the_command(base: Path, tmp_path: Path) -> None:
    """Qwen's folders say do_sample, and a repetition penalty would change greedy texts too."""
    other = Path(shutil.copytree(base, tmp_path / "other"))
    said = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0, "max_new_tokens": 2, "eos_token_id": 0}
    (other / "generation_config.json").write_text(json.dumps(said))
    words = ("--prompt", SAID, "--raw", "--max-new-tokens", "8")
    assert generated(other, *words)["answers"][0]["text"] == generated(base, *words)["answers"][0]["text"]


def test_prompts_come_from_files_and_stdin(base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    answered = [*asked, {"role": "assistant", "content": "Nobody."}]
    rows.write_text("".join(json.dumps(row) + "\n\n" for row in ({"messages": asked}, {"messages": answered})))
    few = ("--max-new-tokens", "3")
    first, second = generated(base, "--file", rows, *few)["answers"]
    assert first["text"] == second["text"] and first["prompt_tokens"] == second["prompt_tokens"]
    assert first["messages"] == asked
    mixed = tmp_path / "mixed.jsonl"  # TRL's form of a conversation that has only a prompt, beside texts
    mixed.write_text("".join(json.dumps({"prompt": found}) + "\n" for found in (asked, "Who?")))
    conversation, text = generated(base, "--file", mixed, *few)["answers"]
    assert conversation == first | {"seconds": conversation["seconds"]}
    assert text["text"] == generated(base, "--prompt", "Who?", *few)["answers"][0]["text"]
    assert_refused(invoke("generate", base, "--file", mixed, "--raw"), f"{mixed}:1: is a conversation")
    lines = tmp_path / "lines.txt"
    lines.write_text(f"{SAID}\n\nJULIET:\n")
    named = generated(base, "--file", lines, *few)["answers"]
    words = ["generate", str(base), "--file", "-", *few, "--json"]
    piped = json.loads(CliRunner().invoke(app, words, input=lines.read_text()).stdout)["answers"]
    asked = generated(base, "--prompt", SAID, "--prompt", "JULIET:", *few)["answers"]
    assert [[answer["text"] for answer in answers] for answers in (named, piped)] == [[a["text"] for a in asked]] * 2
    done = invoke("generate", base, "--file", lines, *few)
    assert done.stdout.startswith(f"# {lines}:1: {SAID}\n{named[0]['text']}\n# {lines}:3: JULIET:\n")
    assert done.stderr.count("cut after 3 tokens") == 2


def test_a_batch_has_the_answers_of_its_prompts_alone(base: Path, tmp_path: Path) -> None:
    """Prompts of unequal lengths, of which one ends early, in batches of which the last is smaller."""
    said = ["JULIET:", SAID, "A", "What is in a name? That which we call a rose", "Who?"]
    stopping = Path(shutil.copytree(base, tmp_path / "stopping"))
    words = [*(word for text in said for word in ("--prompt", text)), "--raw", "--max-new-tokens", "8"]
    first = generated(base, *words)["answers"]
    third = RowTokenizer(base).encode_ids(first[0]["text"])[2]
    (stopping / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, third]}))
    alone, together = (generated(stopping, *words, "--batch-size", size)["answers"] for size in ("1", "2"))
    assert {answer["finish"] for answer in alone} == {"stop", "length"}
    for one, other in zip(alone, together, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}
    printed = [invoke("generate", stopping, *words, "--batch-size", size) for size in ("1", "4")]
    assert printed[0].stdout == printed[1].stdout and printed[0].stderr == printed[1].stderr


def test_a_system_message_is_that_of_the_template(base: Path) -> None:
    words = ("--prompt", SAID, "--max-new-tokens", "3")
    with_system = generated(base, *words, "--system", "Be brief.")["answers"][0]
    assert with_system["prompt_tokens"] > generated(base, *words)["answers"][0]["prompt_tokens"]
    assert_refused(invoke("generate", base, *words, "--raw", "--system", "x"), "--system", "Leave it out")


def test_pieces_of_a_stream_are_whole_characters_and_together_the_text(base: Path) -> None:
    tokenizer, pieces = RowTokenizer(base), list[str]()
    ids = tokenizer.encode_ids("naïve 🙂🙃 «été» ok")
    stream = StreamedText(tokenizer, pieces.append)

    class Given:
        def __init__(self, ids: list[int]) -> None:
            self._ids = ids

        def reshape(self, size: int) -> Given:
            return self

        def tolist(self) -> list[int]:
            return self._ids

    stream.put(Given(tokenizer.encode_ids("a prompt")))
    for token in [*ids, tokenizer.special_ids[0]]:
        stream.put(Given([token]))
    stream.end()
    assert "".join(pieces) == stream.text == "naïve 🙂🙃 «été» ok"
    assert not any("�" in piece for piece in pieces) and len(pieces) > 4
    assert stream.tokens[-1] == tokenizer.special_ids[0]


def _empty(folder: Path, base: Path) -> Path:
    return folder


def _file(folder: Path, base: Path) -> Path:
    (folder / "x").write_text("")
    return folder / "x"


def _checkpoints(folder: Path, base: Path) -> Path:
    shutil.copytree(base, folder / "step_00000002")
    (folder / "step_00000002/surogate.json").write_text("{}")
    return folder


def _head(folder: Path, base: Path) -> Path:
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    return folder


def _gguf(folder: Path, base: Path) -> Path:
    (folder / "model-q8_0.gguf").write_bytes(b"GGUF")
    return folder


def _no_weights(folder: Path, base: Path) -> Path:
    shutil.copytree(base, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def _cut_weights(folder: Path, base: Path) -> Path:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    return folder


def _fewer_weights(folder: Path, base: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _unknown(folder: Path, base: Path) -> Path:
    _no_weights(folder, base)
    config = json.loads((base / "config.json").read_text())
    changes = {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    return folder


def _ranges(folder: Path, base: Path) -> Path:
    _no_weights(folder, base)
    (folder / "model_ranges").mkdir()
    return folder


FOLDERS: dict[str, tuple[Callable[[Path, Path], Path], tuple[str, ...]]] = {
    "nothing": (_empty, ("holds no model, no checkpoint and no adapter", "Name the output of a run")),
    "a file": (_file, ("is a file", "Name the output of a run")),
    "a reward model": (_head, ("Qwen3ForSequenceClassification, which writes no text", "Name a language model")),
    "gguf": (_gguf, ("model-q8_0.gguf: is a model for other programs",)),
    "no weights": (_no_weights, ("holds no weights", "Name the folder of a whole model")),
    "cut weights": (_cut_weights, ("does not load in transformers",)),
    "fewer weights": (_fewer_weights, ("does not load in transformers: missing keys: model.layers.1.mlp.up_proj",)),
    "an unknown class": (_unknown, ("does not load in transformers", "nobody")),
    "ranges": (_ranges, ("several processes have each written a part", "surogate export")),
}


def test_a_name_that_the_hub_does_not_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused = invoke("generate", "out/step_00000040", "--prompt", "a")
    assert_refused(refused, "FOLDER: 'out/step_00000040' is not a local directory", "or use a local path")


def test_an_adapter_on_the_hub_is_loaded_on_its_base(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(repo: str, allow_patterns: list[str], **more: object) -> str:
        asked.append(allow_patterns)
        return str(adapter)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = generated("owner/adapter", "--prompt", "a", "--max-new-tokens", "1", "--raw")
    assert found["adapter"] == str(adapter) and found["model"] == str(base)
    assert "adapter_config.json" in asked[0] and not any(name.endswith((".bin", ".pt")) for name in asked[0])


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_writes_no_text_is_told(base: Path, tmp_path: Path, kind: str) -> None:
    make, words = FOLDERS[kind]
    assert_refused(invoke("generate", make(tmp_path, base), "--prompt", "a"), *words)


def test_an_adapter_that_cannot_answer_is_told(base: Path, adapter: Path, tmp_path: Path) -> None:
    def changed(**changes: Any) -> Path:
        folder = Path(shutil.copytree(adapter, tmp_path / "changed", dirs_exist_ok=True))
        config = json.loads((adapter / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        return folder

    ask = ("--prompt", "a")
    gone = invoke("generate", changed(base_model_name_or_path=str(tmp_path / "gone")), *ask)
    assert_refused(gone, "its base (--base names it elsewhere)", "gone")
    assert_refused(invoke("generate", changed(task_type="SEQ_CLS"), *ask), "task_type is SEQ_CLS, which writes no text")
    assert_refused(invoke("generate", changed(base_model_name_or_path=None), *ask), "names no base", "--base MODEL")
    assert_refused(invoke("generate", base, *ask, "--base", base), "holds a model, not an adapter")
    assert_refused(invoke("generate", changed(target_modules=["v_proj"]), *ask), "does not load in PEFT")
    moved = changed(base_model_name_or_path=str(tmp_path / "gone"))
    assert generated(moved, *ask, "--base", base, "--max-new-tokens", "1")["model"] == str(base)


def test_a_missing_library_is_named(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert_refused(invoke("generate", adapter, "--prompt", "a"), "is an adapter, which PEFT loads", "pip install peft")


def test_prompts_that_cannot_be_answered_are_told_before_the_model_is_loaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("surogate.cli.generate.load", refuse)
    long = " ".join(["word"] * 200)
    refused = invoke("generate", base, "--prompt", "a", "--prompt", long)
    assert_refused(refused, "prompt 2: has", "the model reads 64 with its answer", "Shorten it")
    assert_refused(invoke("generate", base), "no prompt: give --prompt TEXT, or --file FILE")
    rows = tmp_path / "rows.jsonl"
    for row, words in {
        "{": ("is no JSON",),
        '{"text": "a"}': ("needs `prompt`, a text or a conversation, or `messages`",),
        '{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}': ("and not both",),
        '{"prompt": " "}': ("prompt is no text, and no list of objects",),
        '{"prompt": [{"content": "a"}]}': ("prompt is no text, and no list of objects with a role",),
        '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}': (
            "prompt ends with a message of the assistant",
        ),
        '{"messages": []}': ("is no list of objects with a role to answer",),
        '{"messages": [{"role": "assistant", "content": "a"}]}': ("to answer",),
        '{"prompt": "a", "tools": "w"}': ("tools", "holds"),
        "": ("holds no prompt",),
    }.items():
        rows.write_text(f"{row}\n")
        assert_refused(invoke("generate", base, "--file", rows), str(rows), *words)
    rows.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert_refused(invoke("generate", base, "--file", rows, "--raw"), "is a conversation, and --raw continues texts")
    assert_refused(invoke("generate", base, "--file", tmp_path / "none"), "cannot be read")
    plain = write_weights(tmp_path / "plain", template=False)
    assert_refused(invoke("generate", plain, "--prompt", "a", "--chat"), "has no chat template", "--raw")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--temperature", "inf"), "is no temperature"),
        (("--temperature", "1", "--top-p", "0"), "is no share"),
        (("--top-p", "0.5"), "has no effect at temperature 0"),
    ],
)
def test_numbers_that_draw_nothing_are_told(base: Path, words: tuple[str, ...], said: str) -> None:
    assert_refused(invoke("generate", base, "--prompt", "a", *words), said)


def test_a_text_that_nobody_can_take_is_no_failure_of_transformers(base: Path) -> None:
    """A pipe without a reader, a full disk behind stdout: the error is the one that printing has raised."""
    model = load(find_files(str(base), load_registry()), "cpu")

    def refuses(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        model.answer([1, 2, 3], Sampling(max_new_tokens=4), [], on_text=refuses)
