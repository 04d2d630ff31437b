from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import surogate_core
from surogate.config.dataset_entry import DatasetEntry
from surogate.data import tokenize as module
from surogate.data.cache import TokenDataset, default_cache_root
from surogate.data.chat.conversation import CONVERSATION
from surogate.data.formats import TEXT, TextOptions
from surogate.data.token_writer import TokenWriter
from surogate.data.tokenize import tokenize_dataset
from surogate.data.tokenizer import Tokenizer
from surogate_core.api import DatasetFormatDef, Encoded, NoOptions
from surogate_core.api.proven_file import PIECE_BYTES, DamagedFile
from surogate_core.errors import ConfigError, PluginError, RunStopped
from surogate_core.origin import Origin


class Entry(DatasetEntry):
    def __init__(self, path: str, **keys: Any) -> None:
        super().__init__(path=path, **keys)


def write_jsonl(path: Path, texts: list[Any]) -> Entry:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Entry(str(path))


def tokenized(entry: Entry, tokenizer: Tokenizer, **options: Any) -> TokenDataset:
    return tokenize_dataset(entry, TEXT, TextOptions(**options), tokenizer)


def documents(dataset: TokenDataset) -> list[list[int]]:
    return [dataset.tokens[a:b].tolist() for a, b in zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True)]


def test_documents_are_the_texts_each_ended_by_eos(tmp_path: Path, tokenizer: Tokenizer, play: str) -> None:
    texts = [play, "", "é", *(play[:i] for i in range(1, 700, 7))]
    dataset = tokenized(write_jsonl(tmp_path / "a.jsonl", texts), tokenizer)
    assert documents(dataset) == [[*tokenizer.encode_ids(text), 0] for text in texts if text]
    assert dataset.n_bytes == sum(len(text.encode()) for text in texts)
    assert dataset.trained_at(np.arange(dataset.n_tokens)).all()
    assert (dataset.n_docs, dataset.max_token) == (len(texts) - 1, int(dataset.tokens.max()))


def test_second_call_maps_the_cache_and_reads_no_row(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", [play])
    first = tokenized(entry, tokenizer)
    assert first.path is not None and first.path.parent == default_cache_root() == tmp_path / "cache/surogate/tokens"
    assert isinstance(first.tokens, np.memmap)
    monkeypatch.setattr(module, "_write", None)
    assert documents(tokenized(entry, tokenizer)) == documents(first)


def test_documents_know_their_rows_wherever_the_files_are_moved(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    write_jsonl(tmp_path / "old/a.jsonl", ["one", "", "three"])
    (tmp_path / "old/b.jsonl").write_text('\n\n{"text": "three"}\n{"text": ""}\n\n{"text": "six"}\n')
    first = tokenized(Entry(f"{tmp_path}/old"), tokenizer)
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.setattr(module, "_write", None)
    again = tokenized(Entry(f"{tmp_path}/new"), tokenizer)
    for dataset, folder in ((first, "old"), (again, "new")):
        places = [dataset.where(document).removeprefix(f"{tmp_path}/{folder}/") for document in range(4)]
        assert places == ["a.jsonl:1", "a.jsonl:3", "b.jsonl:3", "b.jsonl:6"]


def test_a_newer_version_of_a_type_tokenises_again_and_moved_or_commented_code_does_not(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", [play])

    def made(type: DatasetFormatDef) -> Path | None:
        return tokenize_dataset(entry, type, TextOptions(), tokenizer).path

    source = "def encode(row, tokenizer, options):\n    return plain(row, tokenizer, options)\n"
    elsewhere: dict[str, Any] = {"plain": TEXT.encode, "__name__": "elsewhere"}
    exec(f"# a comment\n{source}", elsewhere)
    moved = replace(TEXT, encode=elsewhere["encode"])
    assert made(TEXT) == made(moved) != made(replace(TEXT, version=2))
    of_plugin = replace(TEXT, origin=Origin("dataset type", "acme", "acme", "1.0", "acme"))
    before = made(of_plugin)
    monkeypatch.setattr(module, "CONVERSATION", replace(CONVERSATION, version=CONVERSATION.version + 1))
    assert before != made(of_plugin) and made(TEXT) == made(moved), "types of plugins may encode conversations"


def test_cache_follows_content_tokenizer_and_settings(tmp_path: Path, tokenizer_dir: Path, play: str) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", [play, play])
    paths = [tokenized(entry, Tokenizer(tokenizer_dir)).path]
    paths.append(tokenized(Entry(entry.path, samples=1), Tokenizer(tokenizer_dir)).path)
    paths.append(tokenized(entry, Tokenizer(tokenizer_dir), add_bos=False).path)
    (tokenizer_dir / "tokenizer_config.json").write_text("{}")
    paths.append(tokenized(entry, Tokenizer(tokenizer_dir)).path)
    write_jsonl(tmp_path / "a.jsonl", [play, play + "!"])
    paths.append(tokenized(entry, Tokenizer(tokenizer_dir)).path)
    assert len(set(paths)) == 5


def test_cache_does_not_depend_on_sequence_len(tmp_path: Path, tokenizer: Tokenizer, play: str) -> None:
    dataset = tokenized(write_jsonl(tmp_path / "a.jsonl", [play]), tokenizer)
    assert dataset.path is not None
    settings = json.loads((dataset.path / "manifest.json").read_text())["settings"]
    assert sorted(settings) == ["cache_format", "content", "options", "tokenizer", "tokenizers", "type", "version"]
    assert sorted(settings["options"]) == ["add_bos", "sample_by", "text_field"]


FILES = ("tokens.bin", "mask.bin", "offsets.npy", "hashes.bin", "places.bin", "pieces.bin", "manifest.json")


@pytest.mark.parametrize("damage", [*FILES, "missing"])
def test_damaged_cache_is_named_and_rebuilt(
    tmp_path: Path, tokenizer: Tokenizer, play: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", [play, "hear me"])
    whole = tokenized(entry, tokenizer)
    expected = documents(whole)
    assert whole.path is not None
    if damage == "missing":
        (whole.path / "mask.bin").unlink()
    else:
        content = (whole.path / damage).read_bytes()
        (whole.path / damage).write_bytes(content[:-1])
    again = tokenized(entry, tokenizer)
    assert documents(again) == expected
    notice = capsys.readouterr().err
    assert "damaged and will be rebuilt" in notice and str(whole.path) in notice
    tokenized(entry, tokenizer)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", FILES)
def test_a_flipped_bit_is_found_before_what_it_changed_is_used(
    tmp_path: Path, tokenizer: Tokenizer, play: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of tokens and places when they are first read: then the next start makes the cache anew."""
    entry = write_jsonl(tmp_path / "a.jsonl", [play, "hear me"])
    whole = tokenized(entry, tokenizer)
    assert whole.path is not None
    expected, (first, *_) = documents(whole), np.array(whole.hashes)
    flip(whole.path / damage)
    again = tokenized(entry, tokenizer)
    if damage in ("tokens.bin", "places.bin"):
        assert capsys.readouterr().err == ""
        with pytest.raises(DamagedFile, match=rf"{damage}: bytes 0 to .* differ from what was written.*Start again"):
            again.where(1) if damage == "places.bin" else again.tokens_at(np.arange(3))
        again = tokenized(entry, tokenizer)
    notice = capsys.readouterr().err
    assert "damaged and will be rebuilt" in notice and str(whole.path / damage) in notice
    assert documents(again) == expected and again.hashes[0] == first
    again.verify()


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 4
    path.write_bytes(content)


def test_each_piece_is_verified_once_and_only_when_it_is_read(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    plain = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: (hashed.append(len(data)), plain(data))[1])
    dataset = tokenized(write_jsonl(tmp_path / "a.jsonl", [play] * 1200), tokenizer)
    assert dataset.path is not None and dataset.n_tokens * 2 > 2 * PIECE_BYTES
    flip(dataset.path / "tokens.bin", 0.999)
    hashed.clear()
    for _ in range(2):
        assert dataset.tokens_at(np.array([1, 9, PIECE_BYTES // 2 + 1])).tolist()
    assert hashed == [PIECE_BYTES] * 2
    with pytest.raises(DamagedFile, match=f"bytes {PIECE_BYTES * (dataset.n_tokens * 2 // PIECE_BYTES):,} to "):
        dataset.verify()


def test_a_cache_with_the_manifest_of_another_is_damaged(
    tmp_path: Path, tokenizer: Tokenizer, play: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (tokenized(write_jsonl(tmp_path / name, [name, play]), tokenizer) for name in ("a.jsonl", "b.jsonl"))
    assert one.path is not None and other.path is not None
    expected = documents(other)
    shutil.copytree(one.path, other.path, dirs_exist_ok=True)
    assert documents(tokenized(Entry(str(tmp_path / "b.jsonl")), tokenizer)) == expected
    assert f"is of another cache, {one.path.name}" in capsys.readouterr().err


def test_failed_write_leaves_no_files(tmp_path: Path, tokenizer: Tokenizer, play: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": play}) + "\n{broken\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:2"):
        tokenized(Entry(str(tmp_path / "a.jsonl")), tokenizer)
    assert [path for path in default_cache_root().iterdir() if path.suffix != ".lock"] == []


def test_full_disk_stops_the_run_and_leaves_no_files(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "append", append)
    with pytest.raises(RunStopped, match="disk is full"):
        tokenized(write_jsonl(tmp_path / "a.jsonl", [play]), tokenizer)
    assert [path for path in default_cache_root().iterdir() if path.suffix != ".lock"] == []


def test_unwritable_cache_root_names_the_remedy(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="Set XDG_CACHE_HOME"):
        tokenized(write_jsonl(tmp_path / "a.jsonl", [play]), tokenizer)


def test_partial_cache_of_a_killed_process_is_removed(tmp_path: Path, tokenizer: Tokenizer, play: str) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", [play])
    path = tokenized(entry, tokenizer).path
    assert path is not None
    (path / "tokens.bin").unlink()
    left_over = path.with_name(path.name + ".partial")
    for journal in (None, "", "{broken", '{"n_tokens": 10000}\n', "[1]\n", '{"rows": 1, "n_docs": 1, "bits": "1"}\n'):
        shutil.rmtree(path)
        left_over.mkdir()
        (left_over / "tokens.bin").write_text("half")
        if journal is not None:
            for name in ("mask.bin", "lengths.bin"):
                (left_over / name).write_text("other half")
            (left_over / "shards.jsonl").write_text(journal)
        assert documents(tokenized(entry, tokenizer)) == [[*tokenizer.encode_ids(play), 0]]
        assert not left_over.exists()


KILLED = """
import sys, time
from pathlib import Path
from surogate.config.schema import DatasetEntry
from surogate.data import tokenize
from surogate.data.chat.conversation import CONVERSATION
from surogate.data.formats import TEXT, TextOptions
from surogate.data.tokenizer import Tokenizer
tokenize.SHARD_TOKENS, tokenize.CHUNK_ROWS = 500, 8
entry = DatasetEntry(path=sys.argv[1], type="text")
slowly = lambda what: time.sleep(0.005)
tokenize.tokenize_dataset(entry, TEXT, TextOptions(), Tokenizer(Path(sys.argv[2])), Path(sys.argv[3]), moved=slowly)
"""


@pytest.mark.parametrize("shards", [1, 7])
def test_shards_of_a_killed_process_are_continued_to_the_same_bytes(
    shards: int, tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at a random moment after the first shards; the next process encodes only the rows after them."""
    choice = random.Random()
    entry = write_jsonl(
        tmp_path / "a.jsonl", [(3 * play)[i % 99 : i % 99 + choice.randrange(200)] for i in range(5000)]
    )
    straight = tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, tmp_path / "straight")
    assert straight.path is not None
    cache = tmp_path / "cache"
    partial = cache / f"{straight.path.name}.partial"
    command = [sys.executable, "-c", KILLED, entry.path, str(tokenizer.directory), str(cache)]
    with subprocess.Popen(command) as process:
        while process.poll() is None and lines(partial / "shards.jsonl") < shards:
            time.sleep(0.001)
        time.sleep(choice.random() * 0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it was done before it could be killed"
    journal = (partial / "shards.jsonl").read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in journal if line.endswith("\n")]
    assert len(whole) >= shards

    encoded: list[int] = []
    encode = module.encode_rows
    monkeypatch.setattr(module, "encode_rows", lambda rows, *rest: (encoded.append(len(rows)), encode(rows, *rest))[1])
    printed: list[str] = []
    resumed = tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, cache, notice=printed.append)
    resumed.verify()
    assert resumed.path is not None
    assert sum(encoded) == 5000 - whole[-1]["rows"] and whole[-1]["rows"] > 0
    assert f"continuing after {len(whole)} shards ({whole[-1]['n_tokens']:,} tokens)" in printed[0]
    files = sorted(path.name for path in straight.path.iterdir())
    assert files == sorted(path.name for path in resumed.path.iterdir())
    for name in files:
        assert (straight.path / name).read_bytes() == (resumed.path / name).read_bytes(), name


def test_a_shard_that_was_damaged_since_is_written_again(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 500)
    monkeypatch.setattr(module, "CHUNK_ROWS", 8)
    entry = write_jsonl(tmp_path / "a.jsonl", [play[i : i + 90] for i in range(400)])
    straight = tokenized(entry, tokenizer)
    assert straight.path is not None
    partial = tmp_path / "cut" / f"{straight.path.name}.partial"

    def stop(what: str) -> None:
        if lines(partial / "shards.jsonl") > 4:
            raise KeyboardInterrupt

    printed: list[str] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, tmp_path / "cut", moved=stop, notice=printed.append)
        kept = json.loads((partial / "shards.jsonl").read_text().splitlines()[2])
    content = bytearray((partial / "hashes.bin").read_bytes())
    content[kept["n_docs"] * 8 + 3] ^= 1  # in the fourth shard
    (partial / "hashes.bin").write_bytes(content)
    printed.clear()
    resumed = tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, tmp_path / "cut", notice=printed.append)
    assert "continuing after 3 shards" in printed[0]
    for file in straight.path.iterdir():
        assert resumed.path is not None and file.read_bytes() == (resumed.path / file.name).read_bytes(), file.name


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_large_vocabulary_is_stored_as_uint32(tmp_path: Path, word_tokenizer: Callable[[int], Tokenizer]) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", ["w69999 w1", "w65536"])
    dataset = tokenized(entry, word_tokenizer(70_000))
    assert dataset.tokens.dtype == np.uint32
    assert documents(dataset) == [[69_999, 1], [65_536]]
    assert dataset.max_token == 69_999
    assert tokenized(write_jsonl(tmp_path / "b.jsonl", ["w65535"]), word_tokenizer(65_536)).tokens.dtype == np.uint16


def test_mask_bits_survive_any_document_lengths(tmp_path: Path, word_tokenizer: Callable[[int], Tokenizer]) -> None:
    def encode(row: Any, tokenizer: Tokenizer, options: Any) -> Encoded:
        tokens = tokenizer.encode_ids(row["text"])
        return Encoded(tokens, [token % 3 == 0 for token in tokens])

    masked = DatasetFormatDef(
        name="masked", summary="", options=NoOptions, matches=lambda c: True, fields=lambda o: ("text",), encode=encode
    )
    texts = [" ".join(f"w{(i * 7 + j) % 97}" for j in range(i % 13 + 1)) for i in range(600)]
    dataset = tokenize_dataset(write_jsonl(tmp_path / "a.jsonl", texts), masked, NoOptions(), word_tokenizer(97))
    assert dataset.trained_at(np.arange(dataset.n_tokens)).tolist() == (np.array(dataset.tokens) % 3 == 0).tolist()
    assert dataset.trained_at(np.arange(11, 30)).tolist() == (np.array(dataset.tokens[11:30]) % 3 == 0).tolist()
    assert dataset.n_trained == int((np.array(dataset.tokens) % 3 == 0).sum())


def test_a_format_that_returns_invalid_tokens_raises_a_plugin_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for encoded in (Encoded([1, 2], [True]), Encoded([-1], [True]), Encoded([tokenizer.vocab_size], [True])):
        broken = DatasetFormatDef(
            name="broken", summary="", options=NoOptions, matches=lambda c: True, fields=lambda o: (),
            encode=lambda row, tokenizer, options, given=encoded: given,  # type: ignore[misc]
        )  # fmt: skip
        with pytest.raises(PluginError, match=r"a\.jsonl:1: dataset type 'broken'"):
            tokenize_dataset(write_jsonl(tmp_path / "a.jsonl", ["a"]), broken, NoOptions(), tokenizer)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", None], r"a\.jsonl:2: column 'text' holds null"),
        (["a", 3], r"a\.jsonl:2: column 'text' holds a number \(3\)"),
        (["a", ["b"]], r"a\.jsonl:2: column 'text' holds a list"),
        (["\ud800"], r"a\.jsonl:1: .*surrogate"),
        (["", ""], "every row is empty"),
    ],
)
def test_rows_without_text_are_named(tmp_path: Path, tokenizer: Tokenizer, texts: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenized(write_jsonl(tmp_path / "a.jsonl", texts), tokenizer)


def test_bos_is_added_on_demand_and_refused_without_one(tmp_path: Path, tokenizer_dir: Path, play: str) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", [play])
    with pytest.raises(ConfigError, match="defines no bos"):
        tokenized(entry, Tokenizer(tokenizer_dir), add_bos=True)
    (tokenizer_dir / "tokenizer_config.json").write_text('{"bos_token": "!", "eos_token": "<|endoftext|>"}')
    tokenizer = Tokenizer(tokenizer_dir)
    assert documents(tokenized(entry, tokenizer, add_bos=True)) == [
        [tokenizer.bos_id, *tokenizer.encode_ids(play), tokenizer.eos_id]
    ]


def test_progress_counts_rows(tmp_path: Path, tokenizer: Tokenizer, play: str) -> None:
    seen: list[str] = []
    entry = write_jsonl(tmp_path / "a.jsonl", [play] * 1000)
    tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, moved=seen.append)
    assert len(seen) > 2 and seen[-1] == f"tokenising {entry.path}, row 1,000"


TOKENIZE = """
import sys
from types import SimpleNamespace
from pathlib import Path
sys.modules["datasets"] = None
from surogate.data import checks, loader, pack, tokenize
from surogate.data.chat.conversation import CONVERSATION
from surogate.data.formats import TEXT, TextOptions
from surogate.data.tokenizer import Tokenizer
write = tokenize._write
def counted(*arguments):
    print("tokenises")
    write(*arguments)
tokenize._write = counted
entry = SimpleNamespace(
    path=sys.argv[1], subset=None, split="train", samples=None, max_row_bytes=4096, max_document_bytes=1 << 20
)
dataset = tokenize.tokenize_dataset(entry, TEXT, TextOptions(), Tokenizer(Path(sys.argv[2])))
rows = pack.pack(pack.DocumentSpans.of([dataset]), 64)
print(dataset.n_tokens, loader.Loader(rows, 2, 2, 1).step(0).tokens > 0)
assert not {"torch", "transformers"} & set(sys.modules), "heavy import"
"""


def test_listing_the_format_loads_neither_numpy_nor_tokenizers() -> None:
    source = str(Path(surogate_core.__file__).parents[1])
    code = "import sys, surogate.data.formats; assert not {'numpy', 'tokenizers', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}, check=True)


def test_two_concurrent_processes_tokenise_once_without_torch_or_datasets(
    tmp_path: Path, tokenizer_dir: Path, play: str
) -> None:
    entry = write_jsonl(tmp_path / "a.jsonl", [play] * 4000)
    source = str(Path(surogate_core.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "-c", TOKENIZE, entry.path, str(tokenizer_dir)]
    running = [subprocess.Popen(command, env=env, text=True, stdout=-1, stderr=-1) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines()]
    assert lines.count("tokenises") == 1
    assert len({line for line in lines if line.endswith("True")}) == 1
