"""The recipes of examples/recipes run as a reader copies them, in the order of their page."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from surogate.world import watch

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples/recipes"
Do = Callable[[str], str]


@pytest.fixture
def do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Do]:
    """Runs a recipe in a folder that has `examples`, and returns its last line."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(watch, "GRACE_SECONDS", 600.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def do(name: str) -> str:
        runpy.run_path(f"examples/recipes/{name}.py", run_name="__main__")
        return capsys.readouterr().out.splitlines()[-1]

    yield do
    torch.set_num_threads(threads)


def test_the_page_names_every_recipe() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    named = re.findall(r"\(\.\./examples/recipes/(\w+)\.py\)", page)
    assert sorted(named) == sorted(path.stem for path in RECIPES.glob("*.py"))


def test_own_data_is_trained_until_it_no_longer_improves(do: Do) -> None:
    assert re.fullmatch(r"\d+ steps of 40; .*: output/recipes/own-data", do("own_data"))
    assert Path("output/recipes/own-data/model.safetensors").exists()


@pytest.mark.slow
def test_a_model_is_trained_from_scratch_tuned_preferred_and_distilled(do: Do) -> None:
    assert do("pretrain").endswith("output/recipes/pretrain")
    assert re.fullmatch(r"loss [\d.]+ to [\d.]+: output/recipes/sft/adapter, output/recipes/sft-merged", do("sft"))
    assert Path("output/recipes/sft-merged/model.safetensors").exists()
    assert re.fullmatch(r"of held out pairs \d+% are preferred .*: output/recipes/dpo/adapter", do("dpo"))
    assert re.fullmatch(r"divergence from the teacher 0\.\d{4}: output/recipes/student", do("distill"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("own_loss", r"focal loss 7\.\d+ to \d\.\d+"),
        ("engine", r"10,240 tokens, 34 weights, \d+ MiB planned"),
        ("search", r"best: (0\.001|0\.004|0\.016)"),
    ],
)
def test_recipes_that_stand_alone(do: Do, name: str, last: str) -> None:
    assert re.fullmatch(last, do(name))
