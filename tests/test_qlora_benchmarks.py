"""The benchmarks of the guide to QLoRA: what fits a card, and the loss of each weight format."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surogate.config.load import load_config
from surogate_core.plugins.discovery import load_registry

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs/qlora.md"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


@pytest.mark.parametrize(("family", "size", "card"), [("Llama", "3.2-3b", 8), ("Llama", "3.1-8b", 24)])
def test_the_guide_shows_what_is_planned_for_a_card(
    family: str, size: str, card: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = load("fits", monkeypatch)
    shown = [cells(line)[1:4] for line in GUIDE.read_text().splitlines() if line.startswith(f"| {card} GiB |")]
    found = fits.on_card(family, size, card)
    assert [found.model, found.gib, found.speed] in shown


def test_the_guide_has_a_row_for_every_card_and_family(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = load("fits", monkeypatch)
    heading = f"| {' | '.join(fits.HEADINGS)} |\n"
    rows = [cells(line) for line in GUIDE.read_text().partition(heading)[2].partition("\n\n")[0].splitlines()[1:]]
    every = [(f"{card} GiB", family) for card in fits.CARDS for family in fits.FAMILIES]
    assert [(row[0], row[1].partition("-")[0]) for row in rows] == every
    sizes = {f"{family}-{size}".lower() for family, sizes in fits.FAMILIES.items() for size in sizes}
    assert all((fits.MODELS / model / "config.json").exists() for model in sizes)
    assert {row[column].lower() for row in rows for column in (1, 4)} <= sizes


def test_formats_are_compared_with_bf16_runs_of_the_same_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qlora, seeds = load("qlora", monkeypatch), load("seeds", monkeypatch)
    factors = {"bf16": 1.0, "FP8": 1.001, "NF4": 1.02}
    for name in qlora.COMPARISON.variants:
        for seed in seeds.SEEDS:
            loss = seed * factors.get(name, 1.005)
            records = [{"log": "step", "step": 1, "loss": 2 * loss}]
            records += [{"log": "eval", "step": step, "loss": loss * (1 + 1 / step)} for step in (1, 2)]
            folder = seeds.folder_of(qlora.COMPARISON, tmp_path, name, seed)
            folder.mkdir()
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    picture = tmp_path / "loss.png"
    with pytest.raises(SystemExit, match=r"^NF4: differs from bf16 by more than 1.0 %$"):
        seeds.main(qlora.COMPARISON, ["compare", str(tmp_path), "--picture", str(picture)], None)
    heading, _, bf16, fp8, nf4, *_ = capsys.readouterr().out.splitlines()
    assert cells(bf16)[:3] == ["bf16", "3.0000", "1.5000 to 4.5000"] and len(cells(heading)) == len(cells(bf16)) == 6
    assert cells(fp8)[3:] == ["+0.10 %", "+0.10, +0.10, +0.10", "+0.10 %"]
    assert cells(nf4)[3] == "+2.00 %"
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(("module", "name"), [("qlora", "COMPARISON"), ("nvfp4", "FROM_SCRATCH"), ("nvfp4", "ADAPTER")])
def test_the_parts_of_the_training_are_all_runs(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seeds, comparison = load("seeds", monkeypatch), getattr(load(module, monkeypatch), name)
    trained: list[tuple[str, int]] = []
    monkeypatch.setattr(seeds, "train_run", lambda which, folder, settings, run: trained.append(run) or 0)
    for part in ("1/2", "2/2"):
        with pytest.raises(SystemExit) as done:
            seeds.main(comparison, ["train", str(tmp_path), "--part", part, "--at-a-time", "1"], None)
        assert done.value.code == 0
    assert sorted(trained) == sorted((variant, seed) for variant in comparison.variants for seed in seeds.SEEDS)
    with pytest.raises(SystemExit):
        seeds.parse(["train", str(tmp_path), "--part", "3/2"])


def test_a_flag_chooses_another_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seeds, nvfp4 = load("seeds", monkeypatch), load("nvfp4", monkeypatch)
    compared: list[Any] = []
    monkeypatch.setattr(seeds, "compare", lambda comparison, arguments: compared.append(comparison))
    for flags in ([], ["--lora"]):
        seeds.main(nvfp4.FROM_SCRATCH, ["compare", str(tmp_path), *flags], None, lora=nvfp4.ADAPTER)
    assert compared == [nvfp4.FROM_SCRATCH, nvfp4.ADAPTER]
    with pytest.raises(SystemExit):
        seeds.parse(["compare", str(tmp_path), "--lora"])


@pytest.mark.parametrize(("module", "name"), [("qlora", "COMPARISON"), ("nvfp4", "FROM_SCRATCH"), ("nvfp4", "ADAPTER")])
def test_every_variant_is_a_valid_configuration(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    comparison = getattr(load(module, monkeypatch), name)
    registry = load_registry()
    for variant, changes in comparison.variants.items():
        raw = {**comparison.settings(tmp_path, 1), **changes, "output_dir": str(tmp_path / "out")}
        load_config(raw, registry=registry, source=variant, mode=comparison.mode)
