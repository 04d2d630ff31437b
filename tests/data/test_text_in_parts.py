"""A .txt file that is one document is tokenized in parts: with the tokens of the whole, and little memory."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from surogate.config.dataset_entry import DatasetEntry
from surogate.data import tokenize, tokenizer
from surogate.data.cache import TokenDataset
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.divide import reading
from surogate.data.formats import TEXT, TextOptions
from surogate.data.row import Largest
from surogate.data.sources import FileSource, open_source
from surogate.data.tokenize import tokenize_dataset
from surogate_core.api import DatasetFormatDef
from surogate_core.errors import ConfigError

from .conftest import PLAY, write_tokenizer

WHOLE = replace(TEXT, encode_part=None)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRICKY = (
    *("\n", "\r\n", "\r", "\n\n", " ", "  ", "\t", " \n", "\n ", "\x0b", "\u2028", "\x85", "\u3000\n"),
    *(
        "Speak",
        "speak,",
        "A",
        "b.",
        "'s",
        "12",
        "3456",
        "½",
        "²",
        "é",
        "e\u0301",
        "中文",
        "\ufc5e",
        "각",
        "😀",
        "_",
        "//",
        "_x",
    ),
    *("<|end|>", "<|end|>\n", "\n<|end|>", "Title", "\nTitle", "I", "ß", "İ"),
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


SPLITTERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen": lambda: split(QWEN),
    "llama-3": lambda: split(LLAMA3),
    "tekken": lambda: split(TEKKEN),
    "digits": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
IN_PARTS = (*SPLITTERS, "nfc", "nfkc", "gemma", "end token")
HELD = (
    *("prepends", "metaspace", "space first", "across lines", "words", "unigram", "strips", "pattern"),
    *("token with a line break", "takes white space"),
)


def made(folder: Path, name: str) -> RowTokenizer:
    """A small tokenizer of the shape of published ones, trained on a play whose merges reach far."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=name in ("llama-3", "tekken")))
    tokens = ["<|end|>"]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.pre_tokenizer = SPLITTERS.get(name, SPLITTERS["qwen"])()
    if name in ("nfc", "nfkc"):
        backend.normalizer = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}[name]()
    elif name in ("gemma", "prepends", "metaspace"):
        vocab = {text: number for number, text in enumerate(["<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))])}
        for text in ("\n", "▁", *"Speakbr", "Sp", "ea", "Spea", "\n\n", "▁▁", "▁S"):
            vocab.setdefault(text, len(vocab))
        merges = [("S", "p"), ("e", "a"), ("Sp", "ea"), ("\n", "\n"), ("▁", "▁"), ("▁", "S")]
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
        space = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if name == "prepends" else space
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        if name == "metaspace":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        trainer = None
    elif name == "space first":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif name == "across lines":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    elif name == "words":
        backend = tokenizers.Tokenizer(models.WordLevel({"<|end|>": 0, "Speak": 1, "A": 2}, unk_token="<|end|>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = None
    elif name == "unigram":
        backend = tokenizers.Tokenizer(models.Unigram([("<|end|>", -9.0), ("Speak", -1.0), ("\nS", -1.0)], 0, False))
        trainer = None
    elif name == "strips":
        backend.normalizer = normalizers.Strip()
    elif name == "pattern":
        backend.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    if trainer is not None:
        backend.train_from_iterator([PLAY * 3], trainer)
    added = {
        "token with a line break": AddedToken("\nTitle", normalized=False),
        "takes white space": AddedToken("Title", lstrip=True),
        "end token": AddedToken("<|end|>\n", rstrip=True),
    }
    if name in added:
        backend.add_tokens([added[name]])
    return RowTokenizer(write_tokenizer(folder / "tokenizer", backend, eos_token="<|end|>", bos_token="<|end|>"))


def tricky(seed: int, count: int = 1500) -> str:
    choice = random.Random(seed)
    return "".join(choice.choices(TRICKY, k=count)) + "\nSpeak" * 30


TEXTS: dict[str, bytes] = {
    "lines": (PLAY * 12).encode(),
    "with a byte order mark": b"\xef\xbb\xbf" + (PLAY * 12).encode(),
    "windows": (PLAY * 12).replace("\n", "\r\n").encode(),
    "one line": b"Speak speak " * 300,
    "short": b"Speak",
    "tricky": tricky(1).encode(),
    "trickier": tricky(2).encode(),
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 100)
    monkeypatch.setattr(tokenizer, "_WINDOW_CHARS", 40)


def cache(root: Path, path: Path, of: RowTokenizer, kind: DatasetFormatDef = TEXT, **options: Any) -> dict[str, bytes]:
    dataset = tokenize_dataset(DatasetEntry(path=str(path)), kind, TextOptions(**options), of, root)
    dataset.verify()
    assert dataset.path is not None
    return {file.name: file.read_bytes() for file in dataset.path.iterdir()}


@pytest.mark.parametrize("name", [*IN_PARTS, *HELD])
def test_caches_are_those_of_whole_documents_byte_by_byte(name: str, tmp_path: Path) -> None:
    of = made(tmp_path, name)
    (tmp_path / "texts").mkdir()
    for number, content in enumerate(TEXTS.values()):
        (tmp_path / f"texts/{number}.txt").write_bytes(content)
    whole = cache(tmp_path / "whole", tmp_path / "texts", of, WHOLE, add_bos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", 100)
        patch.setattr(tokenizer, "_WINDOW_CHARS", 40)
        parts = list(of.pieces(reading(TEXTS["lines"].decode())))
        assert (len(parts) > 5) == (name in IN_PARTS)
        assert cache(tmp_path / "parts", tmp_path / "texts", of, TEXT, add_bos=True) == whole
        assert cache(tmp_path / "held", tmp_path / "texts", of, WHOLE, add_bos=True) == whole


@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.usefixtures("small_parts")
def test_tokens_of_the_parts_are_those_that_the_library_gives_the_text(name: str, tmp_path: Path) -> None:
    of = made(tmp_path, name)
    for seed in range(40):
        text = tricky(seed, 400)
        assert [token for part in of.pieces(reading(text)) for token in of.encode_batch([part])[0]] == (
            of.encode_batch([text])[0]
        )
        assert "".join(of.pieces(reading(text))) == text


@pytest.mark.usefixtures("small_parts")
def test_lines_of_windows_are_cut_where_the_pattern_keeps_their_ends_together(tmp_path: Path) -> None:
    text = TEXTS["windows"].decode()
    assert len(list(made(tmp_path, "qwen").pieces(reading(text)))) > 5


def test_a_document_in_parts_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = made(tmp_path, "qwen")
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name + PLAY * 9)
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 100)
    entry = DatasetEntry(path=f"{tmp_path}/*.txt", samples=2)
    source = open_source(entry)
    rows = list(source.rows(["text"], divide=of.pieces))
    assert len(rows) > 10 and [row.last for row in rows].count(True) == 2
    assert source.count_columns().filled == {"text": 2}
    dataset = tokenize_dataset(entry, TEXT, TextOptions(), of)
    assert dataset.n_docs == 2 and dataset.n_bytes == 2 * len(PLAY) * 9 + 2
    assert [dataset.where(number) for number in range(2)] == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]


@pytest.mark.usefixtures("small_parts")
def test_an_interrupt_inside_a_document_keeps_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = made(tmp_path, "qwen")
    (tmp_path / "texts").mkdir()
    for name in "abcd":
        (tmp_path / f"texts/{name}.txt").write_text(name + PLAY * 30)
    straight = cache(tmp_path / "straight", tmp_path / "texts", of)
    monkeypatch.setattr(tokenize, "SHARD_TOKENS", 100)
    entry = DatasetEntry(path=f"{tmp_path}/texts")
    append, parts = tokenize.TokenWriter.append_part, 0

    def interrupted(writer: Any, *rest: Any) -> None:
        nonlocal parts
        parts += 1
        append(writer, *rest)
        if writer.counts.n_docs == 2 and writer._part_tokens > 200:
            raise KeyboardInterrupt

    notes: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(tokenize.TokenWriter, "append_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokenize_dataset(entry, TEXT, TextOptions(), of, tmp_path / "cut", notice=notes.append)
    assert "2 finished shards are kept" in notes[-1] and parts > 10
    resumed = tokenize_dataset(entry, TEXT, TextOptions(), of, tmp_path / "cut", notice=notes.append)
    assert "continuing after 2 shards" in notes[-1] and resumed.path is not None
    assert {file.name: file.read_bytes() for file in resumed.path.iterdir()} == straight


@pytest.mark.usefixtures("small_parts")
def test_a_document_that_is_refused_is_left_out_with_all_its_parts(tmp_path: Path) -> None:
    of = made(tmp_path, "qwen")
    (tmp_path / "tokenizer/tokenizer_config.json").write_text("{}")
    of = RowTokenizer(of.directory)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text(PLAY * 30)
    for skip, message in ((True, "every row is left out"), (False, "a.txt: add_bos is true")):
        with pytest.raises(ConfigError, match=message) as whole:
            tokenized(tmp_path / "texts", of, WHOLE, skip)
        with pytest.raises(ConfigError) as parts:
            tokenized(tmp_path / "texts", of, TEXT, skip)
        assert str(parts.value) == str(whole.value)


def tokenized(path: Path, of: RowTokenizer, kind: DatasetFormatDef, skip: bool) -> TokenDataset:
    return tokenize_dataset(DatasetEntry(path=str(path)), kind, TextOptions(add_bos=True), of, skip_bad=skip)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("at", [0, 99, 150, 1999, 3000])
def test_bytes_that_are_no_text_are_named_by_their_place_in_the_file(at: int, tmp_path: Path) -> None:
    content = ("é" * 1500).encode()
    (tmp_path / "a.txt").write_bytes(content[:at] + b"\xff" + content[at:])
    found = []
    for divide in (made(tmp_path, "qwen").pieces, lambda more: iter([more(1 << 20) + more(1 << 20)])):
        with pytest.raises(ConfigError) as refused:
            list(open_source(DatasetEntry(path=str(tmp_path / "a.txt"))).rows(["text"], divide=divide))
        found.append(str(refused.value))
    first = at - at % 2  # a letter that is cut in two is named at its start
    assert found[0] == found[1] and f"at offset {first}. Convert it (iconv -t UTF-8)." in found[0]


@pytest.mark.usefixtures("small_parts")
def test_only_what_is_held_is_bounded_by_memory(tmp_path: Path) -> None:
    of = made(tmp_path, "qwen")
    largest = Largest(document=100_000, held=5_000)
    (tmp_path / "lines.txt").write_text("Speak to me\n" * 8_000)
    (tmp_path / "line.txt.gz").write_bytes(gzip.compress(b"Speak " * 8_000))
    lines, line = (
        FileSource((tmp_path / name,), "document", None, (), largest) for name in ("lines.txt", "line.txt.gz")
    )
    assert len(list(lines.rows(["text"], divide=of.pieces))) > 100
    for rows in (lines.rows(["text"]), line.rows(["text"], divide=of.pieces)):
        with pytest.raises(
            ConfigError, match=r"more than 5,000 bytes .* held in memory.*sample_by to line or paragraph"
        ):
            list(rows)
    (tmp_path / "lines.txt").write_text("Speak to me\n" * 9_000)
    with pytest.raises(ConfigError, match=r"more than 100,000 bytes \(max_document_bytes\)"):
        list(lines.rows(["text"], divide=of.pieces))


def test_a_large_file_is_read_with_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        for _ in range(300):
            file.write((b"x" * 1023 + b"\n") * 1024)
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from surogate.config.schema import DatasetEntry\n"
        "from surogate.data.sources import open_source\n"
        "from surogate.data.tokenizer import Tokenizer\n"
        "import pyarrow\n"
        "source, of = open_source(DatasetEntry(path=sys.argv[1])), Tokenizer(Path(sys.argv[2]))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert source.count_columns().rows == 1\n"
        "print(sum(len(row.values['text']) for row in source.rows(['text'], divide=of.pieces)))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    of = made(tmp_path, "qwen")
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(of.directory)], capture_output=True, text=True, check=True
    )
    size, more = map(int, done.stdout.split())
    assert size == 300 << 20 and more < 60 * 1024


@pytest.mark.parametrize(("name", "differs"), [("qwen", False), ("metaspace", False), ("space first", True)])
def test_caches_of_tokenizers_whose_long_texts_were_cut_before_have_other_names(
    name: str, differs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0 cut long texts for every byte-level tokenizer."""
    of = made(tmp_path, name)
    with monkeypatch.context() as patch:
        patch.setattr(RowTokenizer, "_has_line_cuts", True)
        before = RowTokenizer(of.directory)
    assert (before.fingerprint != of.fingerprint) == differs
