"""Pages in a real browser: everything is drawn, nothing is loaded, no text runs, and it can be read on a phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import invoke, make_workplace, write_model
from report.made_up_run import HOSTILE, Json, gpu, numerics, preferences, records, sample, write_run

from surogate.pages.reports import opened, run_page

sync_api = pytest.importorskip("playwright.sync_api", reason="pages are tried in a browser, by playwright from PyPI")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here: apt-get install chromium")

PHONE, DESK = (390, 844), (1280, 900)
WORDS = "(() => { window.readout = (id) => document.querySelector(`[data-chart=${id}] .readout`).textContent; })()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of every kind: a run with all sections, two runs, odd runs, a plan and data with hostile rows."""
    folder = tmp_path_factory.mktemp("pages")
    place = make_workplace(folder)
    write_model(folder / "model", max_position_embeddings=512)
    rows = [HOSTILE, f"{HOSTILE} once more", f"{HOSTILE} too long " * 60]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    config = place.write(validation_split_ratio=0.0, truncation_strategy="delete", sequence_len=256)
    found = {name: folder / f"{name}.html" for name in ("plan", "data")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert invoke("plan", config, "--device", "rtx4090", "--html", found["plan"]).returncode == 0
        assert invoke("tokenize", config, "--html", found["data"]).returncode == 0
    plan = json.loads(json.dumps(_plan(config)))
    every = [numerics(50), numerics(100), sample(100), sample(100, HOSTILE, HOSTILE), gpu(50), gpu(100)]
    runs = {
        "whole": write_run(folder / "whole", chain(_resumed(100), every), plan=plan),
        "hostile": write_run(folder / "hostile", chain(records(40, name=HOSTILE, change=_hostile), every)),
        "other": write_run(folder / "other", records(80, name="other", rate=5e-4)),
        "long": write_run(folder / "long", records(10_000, every=200, change=_spike), plan=plan),
        "none": write_run(folder / "none", records(0, total=10), plan=plan),
        "one": write_run(folder / "one", records(1)),
        "nan": write_run(folder / "nan", records(40, change=lambda r: r | {"loss": None} if "loss" in r else r)),
    }
    for name, run in runs.items():
        found[name] = folder / f"{name}.html"
        run_page([opened(run)], found[name])
    found["two"] = folder / "two.html"
    run_page([opened(runs["whole"]), opened(runs["other"])], found["two"])
    return found


def _plan(config: Path) -> Json:
    from surogate import run
    from surogate.runs.plan_json import timeline_json, to_json

    planned = run.plan(run.load(config), "h200")
    commands = [["transformers", f"load({HOSTILE!r})"], ["vLLM", "vllm serve output"]]
    document = to_json(planned, "train", "a test")
    return document | {"timeline": timeline_json(planned.memory_timeline()), "commands": commands}


def _resumed(steps: int) -> Iterator[Json]:
    head, *others = records(steps, change=preferences)
    again = next(at for at, record in enumerate(others) if record["step"] > 40)
    yield from (head, *others[:again], head, *others[again:])


def _hostile(record: Json) -> Json:
    if record["log"] == "run":
        return record | {"device": HOSTILE, "config": record["config"] | {HOSTILE: HOSTILE}}
    return record | {"metrics": {HOSTILE: 1.0, f"{HOSTILE} chosen": 1.0, f"{HOSTILE} rejected": 2.0}}


def _spike(record: Json) -> Json:
    return record | ({"loss": 9.0} if record["log"] == "step" and record["step"] == 7_777 else {})


@dataclass
class Seen:
    """A page that was opened, what it has said in the console, and what it asked for besides itself."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def js(self, code: str) -> Any:
        return self.page.evaluate(code)


@pytest.fixture
def show(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    opened_pages = []

    def show_page(name: str, size: tuple[int, int] = DESK, **how: Any) -> Seen:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **how)
        opened_pages.append(context)
        seen = Seen(context.new_page())
        address = pages[name].as_uri()

        def route(route: Any) -> None:
            if route.request.url != address:
                seen.asked.append(route.request.url)
            route.continue_() if route.request.url == address else route.abort()

        context.route("**/*", route)
        seen.page.on("console", lambda message: seen.said.append(message.text))
        seen.page.on("pageerror", lambda error: seen.said.append(str(error)))
        seen.page.goto(address)
        return seen

    yield show_page
    for context in opened_pages:
        context.close()


NAMES = ("whole", "hostile", "two", "long", "none", "one", "nan", "plan", "data")
CHARTS = {"whole": 11, "hostile": 8, "two": 11, "long": 6, "none": 1, "one": 4, "nan": 3, "plan": 1, "data": 0}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_drawn_without_a_message_a_request_or_a_sideways_scroll(show: Any, name: str) -> None:
    seen = show(name, color_scheme="light")
    assert int(seen.js("document.documentElement.dataset.drawn")) > 0, seen.said
    for size, paper in ((DESK, "rgb(245, 246, 249)"), (PHONE, "rgb(17, 20, 26)")):
        if size == PHONE:
            seen.page.emulate_media(color_scheme="dark")
            seen.page.set_viewport_size({"width": size[0], "height": size[1]})
            seen.page.wait_for_function(
                "() => [...document.querySelectorAll('.plot canvas')].every((c) => c.width < 400)"
            )
        assert seen.js("document.querySelectorAll('.plot canvas').length") == CHARTS[name]
        assert seen.js("document.documentElement.scrollWidth") == size[0]
        assert seen.js("getComputedStyle(document.body).backgroundColor") == paper
    assert (seen.said, seen.asked) == ([], [])
    assert seen.page.title().endswith((": report", ": plan", ": data")), "no text of the data ran"


def test_text_of_a_page_that_asks_for_something_is_not_served(show: Any) -> None:
    seen = show("whole")
    seen.js("(() => { const i = new Image(); i.src = 'https://example.org/x.png'; document.body.append(i); })()")
    seen.js("fetch('https://example.org/').catch(() => 0)")
    seen.page.wait_for_timeout(50)
    assert seen.asked == [] and any("Content Security Policy" in line for line in seen.said), "the policy is active"


def test_a_spike_of_one_step_of_ten_thousand_is_drawn(show: Any) -> None:
    seen = show("long")
    spec = seen.js("JSON.parse(document.getElementById('page-data').textContent).charts.loss.lines[0]")
    assert max(spec["hi"]) == 9.0 and len(spec["y"]) == 1500
    ink = seen.js(
        """(() => { const c = document.querySelector('[data-chart=loss] canvas');
        const found = (from, to) => { const left = Math.round(from * c.width), wide = Math.round((to - from) * c.width);
          const d = c.getContext('2d').getImageData(left, 0, wide, Math.round(c.height / 4)).data;
          let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i + 3] > 0 && d[i] + d[i + 1] < 300; return n; };
        return [found(0.7, 0.85), found(0.4, 0.65)]; })()"""
    )
    assert ink[0] > 20 and ink[1] == 0, "far above the curve, at its step alone"


def test_keys_of_the_keyboard_read_values_of_all_charts_and_zoom(show: Any) -> None:
    seen = show("two")
    seen.js(WORDS)
    seen.page.focus("[data-chart=loss] .plot")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        seen.page.keyboard.press(key)
    assert seen.js("readout('loss')").startswith("step 3 · made up: training ")
    assert seen.js("readout('norm')").startswith("step 3 · made up: norm "), "the charts move together"
    assert seen.js("document.querySelector('[data-chart=loss] .readout').getAttribute('aria-live')") == "polite"
    seen.page.keyboard.press("End")
    assert seen.js("readout('loss')").startswith("step 100 ")
    seen.page.keyboard.press("+")
    seen.page.keyboard.press("Home")
    seen.page.keyboard.press("Escape")
    assert seen.said == [] and "resumed" in seen.js("document.querySelector('[data-chart=loss] .keys').textContent")


def test_controls_change_all_charts_and_a_key_hides_its_line(show: Any) -> None:
    seen = show("two")
    seen.page.click("fieldset span:text-is('tokens')")
    seen.js(WORDS)
    seen.page.focus("[data-chart=norm] .plot")
    seen.page.keyboard.press("End")
    assert seen.js("readout('norm')").startswith("102k tokens")
    seen.page.click("[data-chart=loss] button.key-button >> nth=0")
    assert seen.page.get_attribute("[data-chart=loss] button.key-button >> nth=0", "aria-pressed") == "false"
    for name in ("time", "raw", "strong", "log", "everything", "what changes"):
        seen.page.click(f"fieldset span:text-is('{name}')")
    assert seen.said == [] and seen.js("document.querySelectorAll('.plot canvas').length") == CHARTS["two"]


def test_a_chart_is_also_a_table_and_memory_too(show: Any) -> None:
    seen = show("whole")
    assert seen.js("document.querySelectorAll('.as-table table').length") == 0
    seen.page.click("[data-chart=loss] summary")
    seen.page.click("[data-memory] summary")
    seen.page.wait_for_selector("[data-memory] .as-table table")
    rows = seen.js("[...document.querySelectorAll('[data-chart=loss] .as-table tr')].map((r) => r.cells.length)")
    assert len(rows) > 30 and set(rows) == {3}
    assert "peak" not in seen.js("document.querySelector('[data-memory] .as-table tr').textContent")


def test_numerics_are_a_table_by_block_and_frame_what_exceeds_its_format(show: Any) -> None:
    seen = show("whole")
    cells = seen.js("[...document.querySelectorAll('.heat tr')].map((r) => [...r.cells].map((c) => c.textContent))")
    assert cells[0] == ["tensor", "block 0", "block 1", "block 2"] and cells[1] == ["attn.qkv", "40 %", "50 %", "60 %"]
    assert seen.js("[...document.querySelectorAll('.heat .over')].map((c) => c.textContent)") == ["110 %", "120 %"]
    seen.page.select_option(".choose select >> nth=0", "2")
    assert "error at step 100" in seen.js("document.querySelector('.heat caption').textContent")


def test_colours_follow_the_system_until_the_reader_chooses(show: Any) -> None:
    seen = show("plan", color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert seen.js(paper) == "rgb(17, 20, 26)"
    seen.page.click("#theme")
    assert seen.js(paper) == "rgb(245, 246, 249)" and "light" in seen.js("document.getElementById('theme').textContent")
    seen.page.click("#theme")
    assert seen.js(paper) == "rgb(17, 20, 26)" and seen.said == []


def test_a_drag_zooms_all_charts_and_fingers_scroll_the_page(show: Any) -> None:
    seen = show("two")
    box = seen.page.locator("[data-chart=norm] .u-over").bounding_box()
    seen.page.mouse.move(box["x"] + 20, box["y"] + 40)
    seen.page.mouse.down()
    seen.page.mouse.move(box["x"] + 120, box["y"] + 40, steps=4)
    seen.page.mouse.up()
    seen.js(WORDS)
    seen.page.focus("[data-chart=loss] .plot")
    seen.page.keyboard.press("ArrowRight")
    assert seen.said == [] and "step" in seen.js("readout('loss')")
    assert seen.js("getComputedStyle(document.querySelector('.u-over')).touchAction") == "pan-y"


def test_without_scripts_all_text_and_tables_are_there(show: Any) -> None:
    seen = show("whole", java_script_enabled=False)
    text = seen.page.inner_text("main")
    for part in (
        "Validation loss",
        "at the peak",
        "Rewards accuracies",
        "there was a king",
        "attention_bwd",
        "vllm serve",
    ):
        assert part in text
    assert seen.page.locator("button:visible").count() == 0


def test_a_page_prints_without_its_controls(show: Any) -> None:
    seen = show("plan")
    seen.page.emulate_media(media="print")
    assert not seen.page.locator("nav").is_visible() and seen.page.locator("table >> nth=0").is_visible()
