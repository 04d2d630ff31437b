"""Pre-tokenizers are found by what they do, and tokenizers that llama.cpp does not have are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from serving.contexts import context_of
from serving.tiny_models import write_model, write_tokenizer
from serving.tiny_tokenizers import CHATML, LLAMA3, QWEN, TEKKEN, byte_level
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from surogate_core.api import ConfigError
from surogate_export_gguf import pieces, splits, tokenizer, writer

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Qwen3."""
    return write_model("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def keys_of(folder: Path, notice: Callable[[str], None] = print, **changes: Any) -> dict[str, Any]:
    """Return the keys of the file of a model."""
    kept = writer.prepare(context_of(folder, "bf16", notice, **changes)).writer.kv_data[0]
    return {key: value.value for key, value in kept.items()}


def copied(folder: Path, to: Path) -> Path:
    """Return a copy of the folder of a model."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def edited(folder: Path, to: Path, name: str, edit: Edit) -> Path:
    """Return a copy of a model with an edited JSON file."""
    copied(folder, to)
    found = json.loads((to / name).read_text(encoding="utf-8"))
    edit(found)
    (to / name).write_text(json.dumps(found), encoding="utf-8")
    return to


# ------------------------------------------------------------------------------------------------- pre-tokenizers


@pytest.mark.parametrize("known", splits.SPLITS, ids=lambda known: known.name)
def test_every_name_finds_itself(known: splits.Split) -> None:
    if not known.published:
        match = splits.nearest(lambda text: splits.split(text, known.expressions), ignore_merges=known.ignore_merges)
        assert match == splits.Match(known.name, True, ())
    else:
        match = splits.nearest(lambda text: splits.split(text, [known.published]), ignore_merges=known.ignore_merges)
        assert (match.name, match.right) == (known.name, True)
        assert 0 < len(match.differs) < len(splits.random_texts()) / 3


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def cut_by(expression: str) -> Any:
    """Return a pre-tokenizer that splits by an expression."""
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), LEVEL])


OWN: list[tuple[Any, bool, str]] = [
    (pre_tokenizers.ByteLevel(add_prefix_space=False), False, "gpt-2"),
    (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        False,
        "smollm",
    ),
    (cut_by(QWEN), False, "qwen2"),
    (cut_by(LLAMA3), False, "smaug-bpe"),
    (cut_by(LLAMA3), True, "llama-bpe"),
    (cut_by(TEKKEN), False, "tekken"),  # which ignores merges: all tokens are what merges make, so it is the same
    (
        cut_by(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        False,
        "smaug-bpe",
    ),
]


@pytest.mark.parametrize(("pre", "ignores", "name"), OWN)
def test_own_tokenizers_have_the_name_that_splits_alike(
    folder: Path, tmp_path: Path, pre: Any, ignores: bool, name: str
) -> None:
    to = copied(folder, tmp_path / "own")
    byte_level(pre, CHATML, ignore_merges=ignores).save(str(to / "tokenizer.json"))
    assert keys_of(to)["tokenizer.ggml.pre"] == name


REFUSED: list[tuple[str, Any, str]] = [
    ("a space in front", pre_tokenizers.ByteLevel(add_prefix_space=True), "The nearest, gpt-2, splits"),
    ("no split", LEVEL, "splits 3"),
    ("white space", pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), LEVEL]), "the shortest is ' '"),
    ("two digits", cut_by(LLAMA3.replace("{1,3}", "{1,2}")), "The nearest, smaug-bpe, splits"),
]


@pytest.mark.parametrize(("pre", "line"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_tokenizer_without_a_name_is_refused_with_the_shortest_text(
    folder: Path, tmp_path: Path, pre: Any, line: str
) -> None:
    to = copied(folder, tmp_path / "own")
    byte_level(pre, CHATML).save(str(to / "tokenizer.json"))
    with pytest.raises(ConfigError, match="has no pre-tokenizer like it") as raised:
        keys_of(to)
    assert line in str(raised.value) and "serve the model with --format hf" in str(raised.value)


def test_tokens_that_merges_do_not_make_need_a_name_that_ignores_merges(folder: Path, tmp_path: Path) -> None:
    def whole(parsed: dict[str, Any]) -> None:
        parsed["model"]["vocab"]["zqxj"] = 1004
        parsed["model"]["ignore_merges"] = True

    to = edited(folder, tmp_path / "own", "tokenizer.json", whole)
    with pytest.raises(ConfigError, match="The nearest, qwen2, merges otherwise"):
        keys_of(to)


def test_bytes_have_the_letters_of_byte_level_bpe() -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = tokenizer.byte_letters()
    assert sorted(letters) == sorted(level.alphabet())
    (found, _), *_ = level.pre_tokenize_str("é\n ~")
    assert found == "".join(letters[byte] for byte in "é\n ~".encode())


# ------------------------------------------------------------------------------------------------------ the keys


def test_types_say_what_tokens_are(folder: Path) -> None:
    keys = keys_of(folder)
    texts, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    kinds = {text: gguf.TokenType(kind).name for text, kind in zip(texts, types, strict=True)}
    assert (kinds["<|im_end|>"], kinds["a"], kinds["[PAD1020]"]) == ("CONTROL", "NORMAL", "UNUSED")


def test_tokens_of_bytes_have_their_types(tmp_path: Path) -> None:
    keys = keys_of(write_model("phi3", tmp_path / "phi3"))
    kinds = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    found = {text: gguf.TokenType(kinds[text]).name for text in ("<0x0A>", "<unk>", "<|end|>")}
    assert found == {"<0x0A>": "BYTE", "<unk>": "UNKNOWN", "<|end|>": "CONTROL"}
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"] is True
    assert "phi3" in keys["general.name"]  # llama.cpp drops spaces after special tokens of no others


def test_a_name_that_llama_cpp_reads_as_phi3_is_changed(folder: Path) -> None:
    assert keys_of(folder, name="my-phi3-like-qwen")["general.name"] == "my-phi 3-like-qwen"


def test_end_tokens_are_the_trained_ones_first(folder: Path) -> None:
    notices: list[str] = []
    keys = keys_of(folder, notices.append, turn_ends=[1002], stops=[1000, 1002, 3, 4])
    named = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")}
    assert named == {"eos": 1002, "eot": 1000, "eom": 3}
    assert "a GGUF file names three end tokens: give '%' to the server as stop texts" in notices


def test_the_first_token_is_added_if_encoding_adds_it(folder: Path, tmp_path: Path) -> None:
    assert keys_of(folder)["tokenizer.ggml.add_bos_token"] is False
    keys = keys_of(write_model("llama3", tmp_path / "llama3"))
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.bos_token_id"]) == (True, 1000)


def test_templates_are_in_the_file(folder: Path, tmp_path: Path) -> None:
    to = copied(folder, tmp_path / "two")
    (to / "additional_chat_templates").mkdir()
    (to / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    keys = keys_of(to)
    assert keys["tokenizer.chat_template"] == (folder / "chat_template.jinja").read_text()
    assert keys["tokenizer.chat_template.tool_use"] == "{{ tools }}"


# --------------------------------------------------------------------------------------- SentencePiece-like tokenizers


@pytest.mark.parametrize(("name", "prefix"), [("mistral", False), ("phi3", True), ("gemma3", False)])
def test_pieces_are_joined_by_scores(tmp_path: Path, name: str, prefix: bool) -> None:
    notices: list[str] = []
    keys = keys_of(write_model(name, tmp_path / name), notices.append)
    assert keys["tokenizer.ggml.add_space_prefix"] is prefix
    assert any("gets no space in front" in line for line in notices) is (name == "mistral")


def test_a_trained_bpe_with_bytes_is_refused(tmp_path: Path) -> None:
    to = write_model("gemma3", tmp_path / "gemma3")

    def fewer(parsed: dict[str, Any]) -> None:
        merges, seen = parsed["model"]["merges"], set()
        parsed["model"]["merges"] = [m for m in merges if "".join(m) not in seen and not seen.add("".join(m))]

    with pytest.raises(ConfigError, match="which is not a merge of the tokenizer"):
        keys_of(edited(to, tmp_path / "own", "tokenizer.json", fewer))


def test_pieces_that_are_split_before_merging_are_refused_with_a_text(tmp_path: Path) -> None:
    to = write_model("gemma3", tmp_path / "gemma3")

    def digits(parsed: dict[str, Any]) -> None:
        parsed["pre_tokenizer"] = {"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated", "invert": False}

    with pytest.raises(ConfigError, match=r"would make other tokens of \d+ of 507 texts, such as "):
        keys_of(edited(to, tmp_path / "own", "tokenizer.json", digits))


def test_plain_joining_is_that_of_the_library() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "aba": 3, "<0x63>": 4, "<unk>": 5}
    merges = [("a", "b"), ("ab", "a"), ("a", "ba")]
    scores = pieces.scores_of(vocabulary, merges)
    assert scores == {"a": -2.0, "b": -2.0, "ab": 0.0, "aba": -1.0, "<0x63>": -2.0, "<unk>": -2.0}
    model = models.BPE(vocab=vocabulary, merges=merges[:2], unk_token="<unk>", byte_fallback=True)
    for text in ("ababa", "abcab", "bbaab", "ccba"):
        wanted = Tokenizer(model).encode(text).ids
        assert pieces.encode(text, vocabulary, scores, 5) == wanted, text


# ---------------------------------------------------------------------------------------------------- bad inputs


def set_rule(rule: str) -> Edit:
    """Give the last added token a rule."""
    return lambda parsed: parsed["added_tokens"][-1].update({rule: True})


BAD: list[tuple[str, str, Edit, str]] = [
    ("lstrip", "tokenizer.json", set_rule("lstrip"), "'<|im_end|>' has lstrip: true in tokenizer.json"),
    ("single word", "tokenizer.json", set_rule("single_word"), "'<|im_end|>' has single_word: true"),
    (
        "another type",
        "tokenizer.json",
        lambda t: t.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
        "llama.cpp's form of the type WordLevel is not known",
    ),
    (
        "a normalizer",
        "tokenizer.json",
        lambda t: t.update(normalizer={"type": "Lowercase"}),
        "llama.cpp has no normalizer Lowercase; it takes text as it is",
    ),
    (
        "a suffix",
        "tokenizer.json",
        lambda t: t["model"].update(end_of_word_suffix="</w>"),
        "end_of_word_suffix is '</w>', which llama.cpp does not know",
    ),
    (
        "a byte without a token",
        "tokenizer.json",
        lambda t: t["model"].update(
            vocab={("Ġ?" if text == "Ã" else text): i for text, i in t["model"]["vocab"].items()},
            merges=[],
        ),
        "has no token for the byte 0xC3",
    ),
    (
        "a model with fewer tokens",
        "config.json",
        lambda c: c.update(vocab_size=1000),
        "tokenizer.json has '<|im_end|>' as id 1002, for which the model has no row (got 1000)",
    ),
    (
        "an embedding of another model",
        "config.json",
        lambda c: c.update(vocab_size=2048),
        "vocab_size: the embedding has 1024 rows (got 2048)",
    ),
    (
        "no BPE at all",
        "tokenizer.json",
        lambda t: t.pop("model"),
        "tokenizer.json is no tokenizer: ",
    ),
]


@pytest.mark.parametrize(("name", "edit", "line"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_llama_cpp_cannot_read_is_one_line(folder: Path, tmp_path: Path, name: str, edit: Edit, line: str) -> None:
    with pytest.raises(ConfigError, match=regex.escape(line)) as raised:
        keys_of(edited(folder, tmp_path / "bad", name, edit))
    assert "\n" not in str(raised.value)


def test_what_is_no_tokenizer_is_told(folder: Path, tmp_path: Path) -> None:
    to = edited(
        folder, tmp_path / "bad", "tokenizer.json", lambda parsed: parsed["model"].update(merges=[["a", "zzz"]])
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer: .*\. Copy that of the base"):
        keys_of(to)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_missing_or_broken_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    to = copied(folder, tmp_path / "bad")
    (to / name).write_text("{")
    with pytest.raises(ConfigError, match=f"{name} is not JSON"):
        keys_of(to)
    (to / name).unlink()
    with pytest.raises(ConfigError, match=f"has no {name}, from which a GGUF file has its tokens"):
        keys_of(to)


@pytest.mark.parametrize(("ends", "line"), [([], "no token ends a turn"), ([5000], "the model has no token 5000")])
def test_a_model_needs_an_end(folder: Path, ends: list[int], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        keys_of(folder, stops=ends, turn_ends=[])


def test_text_in_another_unicode_form_is_a_notice(folder: Path) -> None:
    notices: list[str] = []
    keys_of(folder, notices.append)
    assert any("does not normalize text to NFC" in line for line in notices)
    assert normalizers.NFC().normalize_str("e\u0301") == "é"


def test_tekken_is_a_notice_with_an_example(folder: Path, tmp_path: Path) -> None:
    to, notices = copied(folder, tmp_path / "tekken"), list[str]()
    write_tokenizer(to, "tekken", "mistral-v3-tekken")
    keys_of(to, notices.append, stops=[1001], turn_ends=[])
    assert any("tekken splits" in line and "such as" in line for line in notices)
