"""`surogate report`: the page of a run says what its records say, and withstands records of every kind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from end_to_end.product import invoke
from report.made_up_run import HOSTILE, Json, gpu, numerics, preferences, records, sample, write_run

from surogate.pages.curves import POINTS, curve, ranges
from surogate.pages.findings import findings
from surogate.pages.headline import state_text, tiles
from surogate.pages.page import ASSETS, MARK
from surogate.pages.records import read_run
from surogate.pages.reports import opened, run_page


class Page(HTMLParser):
    """The text, the tags and the data of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text, self.data, self._inside = "", "", [""]
        self.feed(html)
        self.drawn: Json = json.loads(self.data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        self._inside.append("data" if ("id", "page-data") in attrs else tag)
        if tag in ("meta", "img", "input", "br", "link"):
            self._inside.pop()

    def handle_endtag(self, tag: str) -> None:
        self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside[-1] == "data":
            self.data += data
        elif self._inside[-1] not in ("script", "style"):
            self.text += data


def page_of(*folders: Path) -> Page:
    path = folders[0].parent / "report.html"
    written = run_page([opened(folder) for folder in folders], path)
    assert written == path.stat().st_size
    return Page(path.read_text())


def said(folder: Path) -> str:
    return " | ".join(finding.text for finding in findings(opened(folder)))


# ----------------------------------------------------------------------------------------------- what a page has to say


def test_a_page_says_what_was_trained_and_how_it_ended(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", records(200)))
    assert "made up" in page.text and "43.6M of 8.19B parameters" in page.text and "NVIDIA H200" in page.text
    last = read_run(tmp_path / "run").evals[-1]["loss"]
    assert f"Validation loss {last:.4f} nats per token at step 200" in page.text
    assert "finished" in page.text and "9.49k" in page.text and "plan 10.0k" in page.text
    assert len(page.drawn["charts"]["loss"]["lines"][0]["y"]) == 200
    assert f"{tmp_path}/run/metrics.jsonl every step" in " ".join(page.text.split())


def test_a_long_run_loses_no_spike_to_its_thousand_points() -> None:
    values = np.random.default_rng(1).normal(size=10_000)
    values[7_777], values[1_234] = 50.0, -50.0
    drawn = curve(values)
    assert len(drawn["y"]) == len(drawn["lo"]) == POINTS
    assert max(drawn["hi"]) == 50.0 and min(drawn["lo"]) == -50.0
    spans = zip(ranges(10_000), ranges(10_000)[1:], strict=False)
    assert drawn["y"] == [pytest.approx(values[a:b].mean(), rel=1e-4) for a, b in spans]


def test_ten_thousand_steps_with_every_section_are_less_than_a_megabyte_and_a_half(tmp_path: Path) -> None:
    further = [numerics(step) for step in range(0, 10_001, 1000)] + [sample(step) for step in range(0, 10_001, 100)]
    one = write_run(tmp_path / "one", chain(records(10_000, every=100, change=preferences), further))
    two = write_run(tmp_path / "two", records(10_000, every=100, name="other", change=preferences))
    assert run_page([read_run(one)], tmp_path / "one.html") < 600_000
    assert run_page([read_run(one), read_run(two)], tmp_path / "both.html") < 1_500_000


def test_the_metrics_of_a_plugin_have_a_chart_each_and_both_sides_of_a_pair_one(tmp_path: Path) -> None:
    def change(record: Json) -> Json:
        if record["log"] == "run":
            return record
        metrics = {"logps/chosen": -20.0, "logps/rejected": -30.0, "expert_imbalance": 1.5, "z": 0.25}
        return preferences(record) | {"metrics": preferences(record)["metrics"] | metrics}

    page = page_of(write_run(tmp_path / "run", records(40, change=change)))
    for text in ("Preferences", "Routing of experts", "Other metrics", "Z: 0.25 in the last evaluation"):
        assert text in page.text
    assert "Rewards accuracies: 60.0% in the last evaluation" in page.text
    assert page.text.count("of chosen and rejected answers; dashed: held out") == 2
    lines = {name: [line["name"] for line in chart["lines"]] for name, chart in page.drawn["charts"].items()}
    assert ["chosen", "chosen, held out", "rejected", "rejected, held out"] in lines.values()
    assert len([name for name in lines if name.startswith("metric-")]) == 6


def test_two_runs_stand_beside_each_other_with_the_keys_that_differ(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", records(60, name="same", rate=1e-3))
    two = write_run(tmp_path / "two", records(60, name="same", rate=5e-4, change=lambda r: r | lower(r)))
    page = page_of(one, two)
    assert f"same ({two}) ends with the lower validation loss" in page.text
    rows = re.findall(r"learning_rate\s+0\.001\s*0\.0005", page.text)
    assert len(rows) == 1 and "lr_scheduler_type" not in page.text.split("Step by step")[0]
    assert [line["run"] for line in page.drawn["charts"]["loss"]["lines"]] == [0, 0, 1, 1]
    assert len(page.drawn["runs"]) == 2


def lower(record: Json) -> Json:
    return {"loss": record["loss"] - 0.5} if "loss" in record else {}


def test_samples_are_shown_by_prompt_with_the_last_first(tmp_path: Path) -> None:
    found = [sample(step, prompt, f"{prompt} at {step}") for step in (10, 20) for prompt in ("A king", "A queen")]
    odd = [{"kind": "sample", "step": 30, "prompt": "A king", "text": "of another form"}, {"log": "sample", "step": 30}]
    odd.append(sample(5, "A king", "\n \n"))
    text = page_of(write_run(tmp_path / "run", chain(records(30), found, odd))).text
    assert "(nothing that can be seen)" in text
    assert (
        text.index("of another form") < text.index("A king at 20") < text.index("A king at 10") < text.index("A queen")
    )


# ------------------------------------------------------------------------------------------------------ what stands out


def test_steps_that_were_not_applied_and_losses_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    def change(record: Json) -> Json:
        if record["log"] == "step" and record["step"] in (30, 31):
            return record | {"loss": None, "norm": None, "skipped": True}
        return record | ({"loss": None} if record["log"] == "step" and record["step"] == 50 else {})

    folder = write_run(tmp_path / "run", records(100, change=change))
    text = said(folder)
    assert "2 steps, the first 30, not applied" in text and "Step 50 with a loss that is NaN or infinite" in text
    page = page_of(folder)
    assert page.drawn["charts"]["loss"]["marks"] == [30, 31]
    assert [i + 1 for i, y in enumerate(page.drawn["charts"]["loss"]["lines"][0]["y"]) if y is None] == [30, 31, 50]


def test_a_spike_is_named_with_its_step_and_a_calm_run_has_none(tmp_path: Path) -> None:
    spike = lambda r: r | ({"loss": 12.5} if r["log"] == "step" and r["step"] == 321 else {})  # noqa: E731
    assert "spike" not in said(write_run(tmp_path / "calm", records(400)))
    found = said(write_run(tmp_path / "spike", records(400, change=spike)))
    assert "The loss has a spike: 12.500 at step 321, where" in found
    odd = lambda r: spike(r) | ({"in_nats": False} if r["log"] == "eval" else {})  # noqa: E731
    assert "spike" not in said(write_run(tmp_path / "pairs", records(400, change=odd)))


def test_validation_that_rises_names_its_best_step(tmp_path: Path) -> None:
    rising = lambda r: r | ({"loss": 1 + abs(r["step"] - 60) / 100} if r["log"] == "eval" else {})  # noqa: E731
    folder = write_run(tmp_path / "run", records(100, change=rising))
    assert "Validation was best at step 60 (1.0000) and has risen to 1.4000" in said(folder)
    assert "the best was 1.0000 at step 60" in page_of(folder).text


def test_a_run_that_stopped_early_is_finished_and_says_whose_weights_it_has(tmp_path: Path) -> None:
    end = {"log": "outputs", "step": 60, "weights_step": 40, "metric": "loss", "best_step": 40, "best_value": 1.5}
    end |= {"stop_reason": "early stopping: loss has not improved in 2 evaluations in a row", "time": 9.0}
    marked = lambda r: r | ({"best_step": min(r["step"], 40)} if r["log"] == "eval" else {})  # noqa: E731
    run = opened(write_run(tmp_path / "out", iter([*records(60, total=200, change=marked), end])))
    held = {record["step"]: record["loss"] for record in run.evals}
    (validation,) = (tile for tile in tiles(run) if tile.what == "validation loss")
    assert validation.figure == f"{held[40]:.4f}" and validation.beside == (
        f"of the outputs, step 40; {held[60]:.4f} at the end"
    )
    line = page_of(tmp_path / "out").drawn["charts"]["loss"]["lines"][1]
    assert line["y"][line["best"]] == pytest.approx(held[40], rel=1e-4) and line["said"] == "step 40"
    (early, weights) = (finding.text for finding in findings(run) if finding.weight == "note")
    assert state_text(run) == "finished early, step 60 of 200"
    assert early == f"The run ended after step 60 of 200, by {end['stop_reason']}."
    assert weights == "The outputs have the weights after step 40, the best by loss (1.5000)."


def test_speed_power_memory_and_rewards_are_compared_with_what_is_expected(tmp_path: Path) -> None:
    slow = lambda r: r | ({"tokens_per_second": 4000.0} if r["log"] == "step" else {})  # noqa: E731
    assert "4.00k tokens/s, where the plan expects 10.0k" in said(
        write_run(tmp_path / "slow", records(50, change=slow))
    )
    hot = said(write_run(tmp_path / "hot", chain(records(50), [gpu(10, 2**35), gpu(20, 2**35)])))
    assert "The power limit was reached in 100% of the samples" in hot and "32.00 GiB in use" in hot
    assert "chosen answers become less likely" in said(write_run(tmp_path / "dpo", records(200, change=preferences)))


def test_a_resumed_run_is_one_run_and_says_where_it_resumed(tmp_path: Path) -> None:
    first, again = list(records(60, total=100)), list(records(100))
    twice = again[:1] * 2  # the second start repeats the steps of none
    folder = write_run(tmp_path / "run", chain(first, twice, (r for r in again[1:] if r["step"] > 50)))
    run = read_run(folder)
    assert [record["step"] for record in run.steps] == list(range(1, 101))
    assert [record["step"] for record in run.evals] == list(range(10, 101, 10))
    assert "Resumed after step 60." in said(folder)


def test_the_error_that_ended_a_run_is_named_and_one_before_the_last_start_is_history(tmp_path: Path) -> None:
    end = {"log": "end", "step": 60, "status": "failed", "message": "rank 1 was lost", "time": 9.0}
    first, again = list(records(60, total=100)), list(records(100))
    stopped = write_run(tmp_path / "stopped", chain(first, [end]))
    assert "The run ended after step 60 of 100: rank 1 was lost" in said(stopped)
    later = chain(first, [end], again[:1], (r for r in again[1:] if r["step"] > 60))
    resumed = said(write_run(tmp_path / "resumed", later))
    assert "It had ended before: rank 1 was lost" in resumed and "The run ended after" not in resumed
    signal = write_run(tmp_path / "signal", chain(first, [end | {"status": "interrupted", "message": "SIGTERM"}]))
    assert "The run ended after step 60 of 100, by SIGTERM." in said(signal)


# --------------------------------------------------------------------------------- runs that are not whole, and no runs


def test_a_run_of_no_step_has_a_page_with_what_is_known(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", records(0, total=100)))
    assert "not started" in page.text and "No step yet" in page.text and "plan" in page.text
    assert '"page-data"' not in page.text and page.drawn["charts"]["loss"]["lines"] == []


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(37, total=100), cut='{"log": "step", "step": 38, "lo')
    assert read_run(folder).done == 37
    assert "The run ended after step 37 of 100" in page_of(folder).text


def test_a_run_without_run_yaml_or_without_metrics_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    assert "finished" in page_of(folder).text
    (folder / "run.yaml").write_text("run_name: only a config\nlearning_rate: 1.0e-4\n")
    (folder / "metrics.jsonl").unlink()
    page = page_of(folder)
    assert "only a config" in page.text and "not started" in page.text
    (folder / "run.yaml").write_text("[1, 2")
    (folder / "plan.json").write_text("{}")
    assert "run.yaml cannot be read" in said(folder)


def test_metrics_are_found_where_log_file_says(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "logs", records(20)) / "metrics.jsonl"
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text(f"log_file: {elsewhere}\n")
    assert read_run(folder).done == 20


@pytest.mark.parametrize(
    ("holder", "state"),
    [
        ({"pid": os.getpid(), "host": socket.gethostname(), "time": 1}, "running, step 20 of 100"),
        ({"pid": 2**22 + 1, "host": socket.gethostname(), "time": 1}, "killed after step 20 of 100"),
        ({"pid": 1, "host": "another-machine", "time": 1}, "running, step 20 of 100"),
        (None, "stopped after step 20 of 100"),
    ],
)
def test_the_state_of_a_run_is_that_of_the_process_that_holds_it(tmp_path: Path, holder: Any, state: str) -> None:
    folder = write_run(tmp_path / "run", records(20, total=100))
    if holder:
        (folder / ".surogate.lock").write_text(json.dumps(holder))
    (folder / "step_00000010").mkdir()
    page = page_of(folder)
    assert state in page.text
    resumable = state.startswith(("killed", "stopped"))
    assert ("resume_from_checkpoint=true" in page.text) == resumable


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r | {"loss": None, "norm": None} if r["log"] != "run" else r,
        lambda r: {"log": r["log"], "step": r.get("step", 0)} if r["log"] != "run" else {"log": "run"},
        lambda r: {key: "text" if key not in ("log", "step") else value for key, value in r.items()},
        lambda r: {key: [1] if key not in ("log", "step") else value for key, value in r.items()},
        lambda r: r | {"metrics": [1], "total_steps": None, "config": None, "planned": None, "versions": None},
        lambda r: None if r["log"] == "run" else r,
        lambda r: None if r["log"] == "step" else r,
        lambda r: r | {"loss": 1e308, "norm": 0.0, "lr": 0.0, "tokens_per_second": 0.0},
        lambda r: r | {"tokens": 0, "duration_ms": 0.0, "metrics": {"z": None}},
    ],
    ids=["NaN", "bare", "text", "lists", "null", "no start", "no steps", "extreme", "zero"],
)
@pytest.mark.filterwarnings("error")
def test_records_of_every_kind_have_a_page(tmp_path: Path, change: Callable[[Json], Json | None]) -> None:
    folder = write_run(tmp_path / "run", records(80, change=change))
    page_of(folder, write_run(tmp_path / "other", records(80, name="other")))
    assert invoke("report", folder).returncode == 0


@pytest.mark.parametrize(
    "plan", ["[]", "{}", "null", "{", '{"timeline": 1}', '{"timeline": {"kind": []}, "memory": 3}']
)
def test_a_plan_of_another_form_is_named_and_the_rest_is_shown(tmp_path: Path, plan: str) -> None:
    folder = write_run(tmp_path / "run", records(20))
    (folder / "plan.json").write_text(plan)
    done = invoke("report", folder, "--html", tmp_path / "a.html")
    assert done.returncode == 0 and "plan.json" in done.stdout + (tmp_path / "a.html").read_text()
    assert "Loss" in Page((tmp_path / "a.html").read_text()).text


def test_a_config_of_aliases_within_aliases_and_pipes_in_place_of_files_stop_no_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(5, change=lambda r: r | {"config": None} if "config" in r else r))
    bomb = [
        "a: &a0 [x, x, x, x, x, x, x, x, x]",
        *(f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(12)),
    ]
    (folder / "run.yaml").write_text("\n".join(bomb))
    for name in ("plan.json", ".surogate.lock"):
        os.mkfifo(folder / name)
    assert "b11" in page_of(folder).text and (tmp_path / "report.html").stat().st_size < 500_000
    os.mkfifo(tmp_path / "pipe")
    assert "exists and is no report" in invoke("report", folder, "--html", tmp_path / "pipe").stderr


def test_reports_on_numerics_that_are_no_tables_of_numbers_are_left_out_or_have_gaps(tmp_path: Path) -> None:
    odd: list[Any] = [numerics(10) for _ in range(4)]
    odd[0]["tensors"] = {"layers.0.a": ["text", float("nan"), None], "layers.0.b": [1.0], "layers.0.c": 3}
    odd[1]["columns"], odd[2]["tensors"], odd[3]["columns"] = [], [], "range"
    page = page_of(write_run(tmp_path / "run", chain(records(20), odd, [{"log": "numerics", "step": 15}])))
    assert [table["tensors"] for table in page.drawn["numerics"]] == [{"layers.0.a": [None, None, None]}]


def test_a_folder_that_is_no_run_and_pages_that_cannot_be_written_are_refused_in_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(5))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for args, message in {
        (tmp_path / "empty",): "holds no run: no metrics.jsonl, run.yaml or plan.json. Name the output_dir of a run.",
        (tmp_path,): "run.yaml or plan.json. Name one of the runs in it: run.",
        (tmp_path / "nowhere",): "does not exist. Name the output_dir of a run.",
        (tmp_path / "notes.txt",): "is a file. Name the output_dir of a run.",
        (folder, folder): "is the same run. Name another, or one alone.",
        (folder, "--html", tmp_path / "notes.txt"): "exists and is no report. Name another file.",
        (folder, "--html", tmp_path / "no/report.html"): "does not exist. Make it, or name another.",
        (folder, "--html", tmp_path): "is a folder. Name a file",
    }.items():
        done = invoke("report", *args)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --------------------------------------------------------------------------------------------------- the page as a file


@pytest.mark.parametrize("alerts", [{"url": "https://hooks.example/secret", "events": ["nan"]}, "https://x/secret"])
def test_the_address_of_a_webhook_is_on_no_page(tmp_path: Path, alerts: Any) -> None:
    """Not even of a config that no run has written."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "run.yaml").write_text(json.dumps({"model": "m", "alerts": alerts}))
    told = write_run(tmp_path / "told", records(30, alerts=alerts))
    for one in (folder, told):
        run_page([opened(one), opened(folder)], tmp_path / "page.html")
        assert "secret" not in (tmp_path / "page.html").read_text()


def test_texts_of_a_run_are_text_and_never_tags_or_scripts(tmp_path: Path) -> None:
    def change(record: Json) -> Json:
        if record["log"] == "run":
            return record | {"device": HOSTILE, "config": record["config"] | {HOSTILE: HOSTILE}}
        return record | {"metrics": {HOSTILE: 1.0, f"{HOSTILE} chosen": 1.0, f"{HOSTILE} rejected": 2.0}}

    plain = page_of(write_run(tmp_path / "a", chain(records(30), [sample(30), numerics(30)])))
    report = numerics(30)
    report["tensors"] = {HOSTILE: [1.0, 0.0, 0.0]}
    end = {"log": "end", "step": 30, "status": "failed", "message": HOSTILE, "time": 9.0}
    found = chain(records(30, name=HOSTILE, change=change), [sample(30, HOSTILE, HOSTILE), report, end])
    page = page_of(write_run(tmp_path / "b", found))
    assert page.text.count(HOSTILE) >= 7 and page.drawn["runs"][0]["name"] == HOSTILE
    assert page.tags.count("script") == plain.tags.count("script") == 3 and "img" not in page.tags


def test_a_page_names_no_address_and_its_policy_allows_its_own_scripts_alone(tmp_path: Path) -> None:
    page_of(write_run(tmp_path / "run", records(30)))
    html = (tmp_path / "report.html").read_text()
    assert all(address.startswith("#") for address in Page(html).addresses)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|sendBeacon)\b|@import|url\(", html)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src &#39;none&#39;" in policy and "unsafe-inline" not in policy.split("script-src")[1]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    import base64

    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"&#39;sha256-{digest}&#39;" in policy
    assert len(scripts) == 2 and policy.count("sha256-") == 2


def test_equal_records_give_equal_pages_in_place_of_earlier_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(30))
    page_of(folder)
    before = (tmp_path / "report.html").read_bytes()
    page_of(folder)
    assert (tmp_path / "report.html").read_bytes() == before and MARK.encode() in before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report.html"}


def test_places_are_written_from_where_the_command_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page_of(write_run(tmp_path / "run", records(30, output_dir=str(tmp_path / "run"))))
    assert str(tmp_path) not in (tmp_path / "report.html").read_text()


def test_the_library_for_charts_is_the_released_one_with_its_licence() -> None:
    hashes = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (ASSETS / "vendor").iterdir()}
    assert found == hashes and "MIT License" in (ASSETS / "vendor/uPlot.LICENSE").read_text()


def test_a_page_has_the_licence_of_the_library(tmp_path: Path) -> None:
    page_of(write_run(tmp_path / "run", records(3)))
    assert "Copyright (c) 2022 Leon Sorokin" in (tmp_path / "report.html").read_text()


def test_json_has_the_figures_and_findings_of_each_run(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, records(20, name=name, total=100)) for name in ("one", "two"))
    done = invoke("report", one, two, "--json", "--html", tmp_path / "both.html")
    document = json.loads(done.stdout)
    assert [run["name"] for run in document["runs"]] == ["one", "two"]
    assert document["html"] == str(tmp_path / "both.html") and f"wrote {tmp_path}/both.html" in done.stderr
    run = document["runs"][0]
    assert (run["state"], run["steps"], run["total_steps"]) == ("stopped", 20, 100)
    assert {"what": "tokens/s", "figure": "9.49k", "beside": "plan 10.0k"}.keys() == run["figures"][0].keys()
    assert run["findings"][0]["weight"] == "warn"
