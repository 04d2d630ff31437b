"""A topic is a page, a heading or a key of the config; the wheel's pages are those of the repository."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from surogate_core.api import ConfigError
from surogate_docs.pages import IN_CHECKOUT, Page, find, pages

ROOT = Path(__file__).parents[3]
PROGRAM = Path(sys.prefix) / "bin/surogate"


@pytest.fixture(scope="module")
def every() -> dict[str, Page]:
    return pages()


def test_every_page_has_a_title_and_most_a_summary(every: dict[str, Page]) -> None:
    assert IN_CHECKOUT == ROOT / "docs" and {"lora", "reference/config", "write-a-plugin/recipe"} <= every.keys()
    assert not [page.name for page in every.values() if not page.title or page.title.startswith("#")]
    assert sum(bool(page.summary) for page in every.values()) > 0.9 * len(every)
    assert every["lora"].summary.startswith("`lora: true`, short for `adapter: lora`, freezes a model")


def test_a_page_is_found_by_its_name_or_title_without_the_comments_of_tests(every: dict[str, Page]) -> None:
    text = find("several gpus", every)
    assert text.startswith("# Several GPUs and machines") and "<!-- test" not in text
    assert find("Sharding (ZeRO)", every) == find("sharding", every)
    assert find("recipe", every).startswith("# A recipe")


def test_a_key_is_explained_for_each_plugin_that_has_it(every: dict[str, Page]) -> None:
    assert find("lora_rank", every).splitlines()[2:5] == ["Keys of adapter `lora`:", "", "- Type: int >= 1 <= 65536"]
    assert find("learning_rate=1e-4", every).startswith("# learning_rate\n\nOptimizer and schedule:")
    assert find("adamw_beta1", every).count("# adamw_beta1") == 3
    assert "not built" in find("early_stop", every) or "adaptive training" in find("early_stop", every)


def test_a_heading_is_a_section_with_what_is_below_it(every: dict[str, Page]) -> None:
    text = find("dora", every)
    assert text.startswith("## DoRA\n") and text.rstrip().endswith("(in lora)")
    assert "\n## " not in text[3:]


def test_headings_in_code_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A\n\nText.\n\n```bash\n# no heading\n```\n\n## One\n\nx\n\n### Two\n\ny\n\n## Three\n"
    )
    (page,) = pages(tmp_path).values()
    assert [(heading, "Two" in text) for heading, text in page.sections()] == [
        ("One", True),
        ("Two", True),
        ("Three", False),
    ]
    with pytest.raises(ConfigError, match="no page, section or key 'no heading'"):
        find("no heading", {"a": page})


def test_an_unknown_topic_names_the_nearest(every: dict[str, Page]) -> None:
    with pytest.raises(ConfigError, match="'lora_rnk'; near: lora_rank"):
        find("lora_rnk", every)
    with pytest.raises(ConfigError, match="'dpo'; near: coming-from, preference, "):  # they say it most often
        find("dpo", every)


def test_the_command_lists_and_prints(every: dict[str, Page]) -> None:
    def command(*arguments: str) -> str:
        return subprocess.run([PROGRAM, "docs", *arguments], check=True, capture_output=True, text=True).stdout

    assert len(command().splitlines()) == len(every)
    assert command("lora") == every["lora"].text
    assert json.loads(command("several", "gpus", "--json"))["text"] == every["several-gpus"].text
    assert {page["name"] for page in json.loads(command("--json"))["pages"]} == every.keys()


def test_the_entry_for_language_models_lists_every_page(every: dict[str, Page]) -> None:
    spec = importlib.util.spec_from_file_location("llms", ROOT / "docs/llms.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    text = (ROOT / "docs/llms.txt").read_text()
    assert text == generator.page(), "run `python docs/llms.py > docs/llms.txt`"
    missing = [name for name in every if f"({name}.md)" not in text]
    assert not missing, f"no group of docs/llms.py has {missing}"
