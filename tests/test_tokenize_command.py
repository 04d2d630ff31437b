"""`surogate tokenize`: the data of a run as tokens, without torch."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_formats import QWEN25, chat_tokenizer, published_tokenizer
from end_to_end.product import COMMAND, invoke

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The YAML file of a run on ten conversations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("surogate.machine.progress._SILENT_SECONDS", 60.0)  # a busy machine is slow
    chat_tokenizer(tmp_path / "model", QWEN25)
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 600}))
    write(tmp_path, [{"messages": conversation("A friend. " * (n + 1))} for n in range(10)])
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {tmp_path}/model\nfrom_scratch: true\nsequence_len: 256\nvalidation_split_ratio: 0\n"
        f"datasets:\n  - path: {tmp_path}/rows.jsonl\n    type: conversation\n"
    )
    return yaml


def conversation(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Who goes there?"}, {"role": "assistant", "content": answer}]


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenize(run: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return invoke("tokenize", run, *args)


def test_counts_lengths_and_the_trained_share_are_printed(run: Path) -> None:
    result = tokenize(run)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"documents +10\n +tokens +[\d,]+\n +trained +[\d,]+ +\d+\.\d% of the tokens", result.stdout)
    assert re.search(r"lengths +\d+ to \d+ tokens, median \d+", result.stdout)
    assert re.search(r"train +[\d,]+ tokens in \d+ rows of 256, \d+\.\d% padding", result.stdout)
    again = subprocess.run([*COMMAND, "tokenize", str(run)], capture_output=True, text=True, check=True, timeout=60)
    assert again.stdout == result.stdout, "another process reads the cache"


def test_it_says_whose_defaults_the_run_has_where_another_verb_trains_something_else(run: Path) -> None:
    run.write_text(run.read_text().replace("from_scratch: true\n", ""))
    assert tokenize(run).stdout.startswith("defaults of surogate train: all weights (--sft for those of")
    assert "defaults of surogate sft: LoRA" in tokenize(run, "--sft").stdout
    assert json.loads(tokenize(run, "--json").stdout)["defaults"] == "train"
    assert "defaults of" not in tokenize(run, "--set", "lora=true").stdout
    assert "defaults of" not in tokenize(run, "--set", "qlora_bnb=true").stdout


def test_neither_torch_nor_a_model_is_loaded(run: Path) -> None:
    code = (
        "import sys\nfrom surogate.cli.app import main\n"
        f"sys.argv = ['surogate', 'tokenize', {str(run)!r}, '--debug']\n"
        "try:\n    main()\nfinally:\n    print('HEAVY', [m for m in ('torch', 'datasets') if m in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "HEAVY []" in result.stdout, result.stdout + result.stderr


def test_debug_shows_trained_text_in_brackets(run: Path) -> None:
    out = tokenize(run, "--debug").stdout
    assert "\x1b" not in out
    assert "<|im_start|>assistant⏎\n[[A friend. A friend." in out and "<|im_end|>]]⏎" in out


def test_debug_shows_the_shortest_the_median_and_the_longest_document_of_each_entry(run: Path) -> None:
    answers = [f"Number {n}. " + "A friend. " * (9 - n if n else 3) for n in range(8)]
    write(run.parent, [{"messages": conversation(answer)} for answer in answers])
    (run.parent / "more.jsonl").write_text(json.dumps({"messages": conversation("More.")}) + "\n")
    run.write_text(run.read_text() + f"  - path: {run.parent}/more.jsonl\n    type: conversation\n")
    out = tokenize(run, "--debug").stdout
    header = r"^.*/(\w+\.jsonl:\d) \(conversation\), document (\d), \d+ tokens\n"
    assert re.findall(header + r"(?:.*\n)*?.*\[\[(\w+)(?: (\d))?", out, re.M) == [
        ("rows.jsonl:8", "8", "Number", "7"),  # two sentences
        ("rows.jsonl:5", "5", "Number", "4"),
        ("rows.jsonl:2", "2", "Number", "1"),
        ("more.jsonl:1", "9", "More", ""),
    ]
    (where,) = re.findall(r"^(.*rows\.jsonl:5) ", out, re.M)
    assert "[[Number 4. A friend." in tokenize(run, "--at", where).stdout


def test_at_shows_the_row_of_a_file_and_line_as_a_run_tokenizes_it(run: Path) -> None:
    (run.parent / "more.csv").write_text("question,answer\nWho?,More.\n")
    run.write_text(run.read_text() + f"  - path: {run.parent}/more.csv\n    type: auto\n")
    places = {"rows.jsonl:4": "A friend. " * 4, f"{run.parent}/rows.jsonl:1": "A friend. ", "more.csv:2": "More."}
    for place, answer in places.items():
        out = tokenize(run, "--at", place).stdout
        (where,) = re.findall(r"^(\S+) \((?:conversation|instruction)\), \d+ tokens$", out, re.M)
        assert where.endswith(place) and out.count("[[") == 2 and f"[[{answer}<|im_end|>" in out  # the legend has one
    refused = tokenize(run, "--at", "rows.jsonl:4", "--debug")
    assert refused.returncode == 2 and "error: --at and --debug: " in refused.stderr
    refused = tokenize(run, "--at", "ows.jsonl:4")
    assert refused.returncode == 2 and "--at ows.jsonl:4: no row of the data is there. Name its place" in refused.stderr


def test_at_says_why_a_row_is_left_out_or_refused_whatever_other_rows_are(run: Path) -> None:
    named = [{**message, "name": "Bob"} for message in conversation("Yes.")]
    write(run.parent, [{"messages": [{"role": "narrator"}]}, {"messages": named}, {"mesages": []}, {"messages": named}])
    with (run.parent / "rows.jsonl").open("a") as file:
        file.write('{"messages": \n')
    shown = tokenize(run, "--at", "rows.jsonl:4")
    assert "[[Yes.<|im_end|>" in shown.stdout
    assert "left out: the key 'name' of 2 of 2 messages: the chat template does not write it" in shown.stderr
    for line, words in {1: "column 'messages', message 0", 3: "no column 'messages'", 5: "not one JSON"}.items():
        refused = tokenize(run, "--at", f"rows.jsonl:{line}")
        assert refused.returncode == 2 and f"rows.jsonl:{line}: {words}" in refused.stderr, refused.stderr
    (run.parent / "rows.jsonl").write_text('{"text": "A friend."}\n{"text": ""}\n')
    empty = tokenize(run, "--at", "rows.jsonl:2", "--set", f"datasets=[{{path: {run.parent}/rows.jsonl, type: text}}]")
    assert empty.stdout.endswith("rows.jsonl:2 (text): the row has no tokens\n") and "[[" not in empty.stdout


def test_debug_shows_the_spaces_of_sentencepiece_tokens_and_what_is_omitted(run: Path) -> None:
    shutil.rmtree(run.parent / "model")
    published_tokenizer(run.parent / "model", "llama-2", "metaspace")
    (run.parent / "model/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2000}))
    write(run.parent, [{"messages": [{**conversation("A friend.")[0], "name": "Bob"}, conversation("A friend.")[1]]}])
    for _ in range(2):  # the second time from the cache
        result = tokenize(run, "--debug")
        assert "<s>[INST] Who goes there? [/INST][[ A friend. </s>]]" in result.stdout
        assert result.stderr == (
            "datasets.0: left out: the key 'name' of 1 of 1 messages: the chat template does not write it "
            "(first: rows.jsonl:1)\n"
        )


def test_debug_fits_a_terminal_of_80_columns_and_colours_it(run: Path) -> None:
    lines = in_terminal([*COMMAND, "tokenize", str(run), "--debug"]).splitlines()
    assert max(len(ESCAPE.sub("", line)) for line in lines if str(run.parent) not in line) <= 80
    assert any("\x1b[32mA friend." in line for line in lines)
    assert any("\x1b[2mWho goes there?" in line for line in lines)


def in_terminal(command: list[str]) -> str:
    """Return what a command writes to a terminal of 80 columns."""
    master, slave = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environ.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environ) as process:
        os.close(slave)
        output = b""
        try:
            while chunk := os.read(master, 65536):
                output += chunk
        except OSError:  # the other end is closed
            pass
        process.wait(60)
    os.close(master)
    return output.decode()


def test_data_does_not_control_the_terminal(run: Path) -> None:
    write(run.parent, [{"messages": conversation("\x1b[31mred\x07")}])
    assert r"\x1b[31mred\x07" in tokenize(run, "--debug").stdout


def test_bad_data_is_one_message_with_file_and_line(run: Path) -> None:
    write(run.parent, [{"messages": conversation("Yes.")}, {"messages": [{"role": "narrator", "content": "x"}]}])
    result = tokenize(run)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "rows.jsonl:2: column 'messages', message 0 has role 'narrator'" in result.stderr


def test_tokens_past_the_models_vocabulary_are_refused(run: Path) -> None:
    (run.parent / "model/config.json").write_text(json.dumps({"vocab_size": 300}))
    result = tokenize(run)
    assert result.returncode == 2 and "is outside the model's vocab_size of 300" in result.stderr


def test_debug_shows_what_rows_hold_and_not_what_is_left_out_or_cut(run: Path) -> None:
    long = "1 2 3 4 5 6 7 8 9 " * 40
    write(run.parent, [{"messages": conversation(text)} for text in (long, "A friend.", "A friend. " * 3)])
    run.write_text(run.read_text().replace("256", "128"))
    shown = tokenize(run, "--debug").stdout
    assert "document 1," not in shown and "rows.jsonl:2" in shown and "rows.jsonl:3" in shown
    run.write_text(run.read_text() + "truncation_strategy: right\n")
    assert re.search(
        r"rows.jsonl:1 \(conversation\), document 1, 128 of \d{3,} tokens", tokenize(run, "--debug").stdout
    )
    documents = json.loads(tokenize(run, "--debug", "--json").stdout)["documents"]
    assert [d["tokens"] < d["whole_tokens"] for d in sorted(documents, key=lambda d: d["document"])] == [
        True,
        False,
        False,
    ]


def left_out(run: Path) -> list[dict[str, Any]]:
    found = json.loads(tokenize(run, "--json").stdout)["datasets"][0]["left_out"]
    assert isinstance(found, list)
    return found


def test_json_says_how_much_is_left_out_and_why_from_the_rows_that_are_packed(run: Path) -> None:
    long, texts = "1 2 3 4 5 6 7 8 9 " * 40, ["A friend.", "A friend. " * 3]
    assert left_out(run) == []
    write(run.parent, [{"messages": conversation(text)} for text in (*texts, long)])
    lengths = json.loads(tokenize(run, "--json").stdout)["datasets"][0]["lengths"]
    one = {"count": 1, "of": 3, "unit": "documents", "first": f"{run.parent}/rows.jsonl:3"}
    assert left_out(run) == [one | {"what": "", "why": "longer than sequence_len (256)", "tokens": lengths["longest"]}]
    run.write_text(run.read_text() + "truncation_strategy: right\n")
    cut = one | {"what": "a part", "why": "longer than sequence_len (256), and is cut"}
    assert left_out(run) == [cut | {"tokens": lengths["longest"] - 256}]
    run.write_text(run.read_text().replace("right", "split"))
    assert left_out(run) == [], "its parts are in several rows"


def test_json_keeps_the_reasons_of_rows_that_are_skipped_apart(run: Path) -> None:
    rows: list[Any] = [{"messages": conversation("A friend.")}] * 3
    write(run.parent, [*rows, {"messages": [{"role": "user"}]}, {"messages": []}, {"messages": conversation("")[:1]}])
    run.write_text(run.read_text().replace("type: conversation", "type: conversation\n    bad_rows: skip"))
    found = left_out(run)
    assert len({one["why"] for one in found}) == len(found) >= 2
    assert sum(one["count"] for one in found) == 3 and {one["of"] for one in found} == {6}
    assert all(re.search(r"rows\.jsonl:[456]$", one["first"]) for one in found)


def test_json_counts_documents_that_a_weight_does_not_draw(run: Path) -> None:
    run.write_text(run.read_text() + "    weight: 0.5\n")
    (found,) = left_out(run)
    assert (found["count"], found["of"], found["why"]) == (5, 10, "weight: 0.5 does not draw it")


def test_json_has_the_lengths_and_the_packing_of_the_first_rows(run: Path) -> None:
    document = json.loads(tokenize(run, "--json").stdout)
    (dataset,), rows = document["datasets"], document["rows"]["train"]
    assert sum(count for *_, count in dataset["histogram"]) == dataset["documents"]
    ends = dataset["histogram"][0][0], dataset["histogram"][-1][1]
    assert ends == (dataset["lengths"]["shortest"], dataset["lengths"]["longest"])
    packed = [piece for row in rows["first_rows"] for piece in row]
    assert len(rows["first_rows"]) == rows["rows"] and sum(tokens for tokens, _ in packed) == rows["tokens"]
    assert sum(trained for _, trained in packed) == dataset["trained"]
    assert rows["padding"] == pytest.approx(1 - rows["tokens"] / (rows["rows"] * 256))
    assert rows["documents_per_row"] == dataset["documents"] / rows["rows"]
