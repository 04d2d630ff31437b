"""`surogate plan --html`, `tokenize --html`, and the plan that a run leaves for its report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from end_to_end.product import Workplace, invoke, make_workplace, write_model
from report.made_up_run import HOSTILE, records, write_run
from report.test_run_page import Page

from surogate import run
from surogate.pages.data_facts import row_text
from surogate.pages.plan_facts import expanded, memory_of
from surogate.runs.plan_json import timeline_json, to_json


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    place = make_workplace(tmp_path)
    write_model(tmp_path / "model", max_position_embeddings=512)
    return place


def page(path: Path) -> Page:
    return Page(path.read_text())


def test_a_plan_as_a_page_has_the_memory_the_times_and_the_kernels(here: Workplace, tmp_path: Path) -> None:
    done = invoke("plan", here.write(), "--device", "rtx4090", "--html", "plan.html")
    assert done.returncode == 0 and "wrote plan.html" in done.stderr and "fits" in done.stdout
    found = page(tmp_path / "plan.html")
    for text in ("fits", "23.5 GiB on NVIDIA GeForce RTX 4090", "attention_bwd", "at the peak", "surogate-recipe-bf16"):
        assert text in found.text
    assert len(found.drawn["memory"]["op"]) > 20


def test_a_plan_that_does_not_fit_says_so_on_its_page(here: Workplace, tmp_path: Path) -> None:
    given = here.write(device_memory_limit="500MiB")
    invoke("plan", given, "--device", "rtx4090", "--html", "plan.html")
    found = page(tmp_path / "plan.html").text
    assert "does not fit" in found and "too much" in found and "--fit auto" in found


def test_json_and_a_page_can_be_had_at_once(here: Workplace, tmp_path: Path) -> None:
    done = invoke("plan", here.write(), "--device", "h100", "--json", "--html", "plan.html")
    document = json.loads(done.stdout)
    assert document["fits"] and "timeline" not in document and (tmp_path / "plan.html").exists()
    done = invoke("tokenize", here.write(), "--json", "--html", "data.html")
    assert json.loads(done.stdout)["documents"] == [] and (tmp_path / "data.html").exists()


def test_the_areas_of_memory_are_the_bytes_of_the_plan_at_every_op(here: Workplace) -> None:
    made = run.plan(run.load(here.write()), "h100")
    timeline = made.memory_timeline()
    document = to_json(made, "train", "a test") | {"timeline": timeline_json(timeline)}
    memory = memory_of(json.loads(json.dumps(document)))
    count = len(timeline.ops)
    assert memory.drawn["op"] == list(range(count))
    total = np.sum([expanded(area["y"], count) for area in memory.drawn["areas"]], axis=0)
    assert total.tolist() == timeline.totals
    assert memory.total == made.report.device_bytes["total"]
    assert sum(nbytes for _, nbytes, *_ in memory.rows) == memory.total
    assert sum(share for _, _, share, *_ in memory.rows) == pytest.approx(1)


def test_a_run_leaves_its_plan_for_a_report_without_model_or_data(here: Workplace, tmp_path: Path) -> None:
    given = here.write(max_steps=2, warmup_steps=0, eval_steps=0, save_steps=0, verify_outputs=False)
    run.train(run.load(given), notice=lambda line: None)
    plan = json.loads((here.out / "plan.json").read_text())
    assert [name for name, _ in plan["commands"]][:3] == ["surogate", "transformers", "vLLM"] and plan["timeline"][
        "kind"
    ]
    elsewhere = tmp_path / "laptop"
    elsewhere.mkdir()
    for name in ("metrics.jsonl", "plan.json"):
        (elsewhere / name).write_bytes((here.out / name).read_bytes())
    for path in (here.out, tmp_path / "model", tmp_path / "documents.jsonl", given):
        path.rename(path.with_name(f"gone-{path.name}"))
    done = invoke("report", elsewhere, "--html", "report.html")
    assert done.returncode == 0, done.stderr
    found = page(tmp_path / "report.html")
    for text in ("finished", "2 steps", "at the peak", "Time of a step", "vllm serve", "a token, nothing recomputed"):
        assert text in found.text
    assert found.drawn["memory"]["areas"]


def profile(**changes: Any) -> dict[str, Any]:
    kinds = [("linear", 2.0, 1.5), ("attention", 3.0, 1.0)]
    figures = {"calls": 4, "flops": 10**12, "bytes": 10**9}
    found = [{"kind": kind, "seconds": took, "planned_seconds": plan} | figures for kind, took, plan in kinds]
    step = {"seconds": 5.5, "planned_seconds": 2.6, "tokens": 2048}
    return {"device": {"title": "NVIDIA H200"}, "step": step, "kinds": found} | changes


def test_measured_times_stand_beside_the_planned_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    (tmp_path / "profile.json").write_text(json.dumps(profile()))
    done = invoke("report", folder, "--html", tmp_path / "a.html", "--profile", tmp_path / "profile.json")
    assert done.returncode == 0, done.stderr
    text = " ".join(page(tmp_path / "a.html").text.split())
    assert "5.5 s measured on NVIDIA H200, 2.6 s planned: a step of 2,048 tokens." in text
    assert re.search(r"attention ?3 s ?1 s ?60.0% ?4 1,000.0 1.00 ?linear ?2 s ?1.5 s ?40.0%", text)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(profile(kinds=[{"kind": "linear"}])), "not JSON"])
def test_a_file_that_holds_no_profile_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    folder, given = write_run(tmp_path / "run", records(2)), tmp_path / "profile.json"
    given.write_text(text)
    for file, message in (
        (given, "holds no profile. Write one:"),
        (tmp_path / "none.json", "no such file. Write one:"),
    ):
        done = invoke("report", folder, "--html", tmp_path / "a.html", "--profile", file)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert "Add --html FILE" in invoke("report", folder, "--profile", given).stderr
    assert not (tmp_path / "a.html").exists()


def chats(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_page_of_data_shows_rows_as_text_whatever_they_hold(here: Workplace, tmp_path: Path) -> None:
    chats(tmp_path, [HOSTILE, f"{HOSTILE} once more", HOSTILE + " and longer" * 3])
    done = invoke("tokenize", here.write(validation_split_ratio=0.0, sequence_len=512), "--html", "data.html")
    assert done.returncode == 0, done.stderr
    found = page(tmp_path / "data.html")
    assert found.text.count("<script>document.title='owned'</script>") == 3
    assert found.tags.count("script") == 3 and "img" not in found.tags


def test_the_page_of_data_says_what_is_left_out_and_shows_the_row(here: Workplace, tmp_path: Path) -> None:
    long = f"{HOSTILE} a row that is too long " * 40
    chats(tmp_path, ["A short row.", "Another one, a little longer.", long])
    given = here.write(validation_split_ratio=0.0, truncation_strategy="delete", sequence_len=256)
    invoke("tokenize", given, "--html", "data.html")
    found = page(tmp_path / "data.html").text
    assert "1 of 3 documents: longer than sequence_len (256)" in found.replace("\n", "")
    assert re.search(r"first:\s+documents.jsonl:3", found) and "<script>document.title='owned'" in found
    assert "padding" in found and "3 documents of" in found
    assert "tokenizing" not in found


def test_documents_of_pairs_are_shown_as_chosen_or_rejected(here: Workplace, tmp_path: Path) -> None:
    rows = [{"prompt": "Who goes there?", "chosen": " A friend." * n, "rejected": " A foe."} for n in (2, 3, 4)]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"path": str(tmp_path / "pairs.jsonl"), "type": "preference"}]
    given = here.write(datasets=pairs, validation_split_ratio=0.0, sequence_len=256, loss="dpo")
    done = invoke("tokenize", given, "--html", "data.html")
    assert done.returncode == 0, done.stderr
    found = " ".join(page(tmp_path / "data.html").text.split())
    assert re.search(r"pairs.jsonl:\d, rejected, \d+ tokens .*A foe", found)
    assert re.search(r"pairs.jsonl:3, chosen, \d+ tokens .*A friend", found) and "3 pairs," in found


@pytest.mark.parametrize(
    ("name", "text", "place", "shown"),
    [
        ("rows.jsonl", '{"a": 1}\n{"b": 2}\n', "rows.jsonl:2", '{"b": 2}'),
        ("rows.jsonl", '{"a": 1}\n', "rows.jsonl:7", ""),
        ("rows.jsonl", "x" * 5000, "rows.jsonl:1", "x" * 400 + "\N{HORIZONTAL ELLIPSIS}"),
        ("rows.parquet", "PAR1", "rows.parquet row 6", ""),
        ("rows.parquet", "PAR1\n", "rows.parquet:1", ""),
        ("rows.jsonl", "a", "", ""),
        ("rows.jsonl", "a", "elsewhere.jsonl:1", ""),
    ],
)
def test_a_row_that_is_left_out_is_found_by_its_place(
    tmp_path: Path, name: str, text: str, place: str, shown: str
) -> None:
    (tmp_path / name).write_text(text)
    assert row_text(place, tmp_path) == shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("plan", "--fit", "auto", "--html", "a.html"), "--fit and --html: a page is of one plan"),
        (("plan", "--diff", "reduce", "--html", "a.html"), "--diff and --html: --diff prints nothing but a diff"),
        (
            ("tokenize", "--at", "documents.jsonl:1", "--html", "a.html"),
            "--at and --html: a page shows the data of a run",
        ),
        (("plan", "--html", "documents.jsonl"), "--html documents.jsonl: exists and is no report"),
        (("tokenize", "--html", "no/a.html"), "--html no/a.html: the folder no does not exist"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_the_work(
    here: Workplace, tmp_path: Path, command: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(*given: Any, **named: Any) -> Callable[..., None]:
        raise AssertionError("it began to work")

    monkeypatch.setattr("surogate.run.plan", works)
    monkeypatch.setattr("surogate.run.tokenize", works)
    done = invoke(command[0], here.write(), *command[1:])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
