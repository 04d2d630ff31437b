"""Stacks of experts in files: read and written a few experts at a time, by each process its part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stacked_family import CONFIG, MODEL, dims
from torch import Tensor

from surogate.checkpoints import moved_tensors
from surogate.checkpoints.base_files import moved_in
from surogate.checkpoints.base_files import moved_tensors as with_layouts
from surogate.checkpoints.hf import ModelExport, save_model
from surogate.checkpoints.model_ranges import IN_ROWS, in_rows, join_ranges, load_model, write_ranges
from surogate.checkpoints.saved_run import SavedRun
from surogate.checkpoints.stored_weights import open_weights
from surogate_core.api import ConfigError, HFTensor, WeightMap
from surogate_core.plugins.discovery import load_registry
from surogate_core.runtime.pieces import Pieces
from surogate_models.api import Stacked, Transposed

DIMS = dims(CONFIG | {"vocab_size": 97})
MAPS = MODEL.weights(DIMS)
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@dataclass(frozen=True)
class Watched:
    """A layout that notes how many indices it moves at a time."""

    of: Stacked
    seen: list[int] = field(default_factory=list, compare=False)
    leading = True

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return self.of.shape(stored)

    def load(self, stored: Tensor) -> Tensor:
        self.seen.append(len(stored))
        return self.of.load(stored)

    def save(self, rows: Tensor) -> Tensor:
        self.seen.append(len(rows) // self.of.rows)
        return self.of.save(rows)


def stored() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {t.name: torch.randn(t.shape) for m in MAPS for t in m.tensors}


def rows() -> dict[str, Tensor]:
    given = stored()
    return {m.param: torch.cat([t.load(given[t.name]) for t in m.tensors]) for m in MAPS}


def parts(params: dict[str, Tensor], count: int) -> Iterator[dict[str, Pieces]]:
    """Yield what each of some processes of two ranks has of matrices; the first one also has the vectors."""
    for process in range(count):
        found = {}
        for name, param in params.items():
            flat = param.view(-1)
            if param.dim() == 2:
                size = -(-flat.numel() // (2 * count))
                held = flat.split(size)[2 * process : 2 * process + 2]
                found[name] = Pieces(tuple(param.shape), 2 * process * size, held)
            elif process == 0:
                found[name] = Pieces.of(param)
        yield found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two experts be the most that are moved at a time."""
    monkeypatch.setattr(moved_tensors, "PART", 2 * 64 * 128)


def export(params: dict[str, Pieces], maps: Any = MAPS, **more: Any) -> ModelExport:
    return ModelExport(weights=maps, params=params, config=CONFIG, source_dir=None, dtype="fp32", **more)


@pytest.mark.usefixtures("small")
def test_a_stack_is_read_and_written_a_few_experts_at_a_time(tmp_path: Path) -> None:
    given, layout = stored(), Watched(Stacked(128, Transposed()))
    tensor = HFTensor(GATE_UP, (5, 64, 128), layout)
    maps = [WeightMap("gate_up", (tensor,), matrices=5)]
    save_file({GATE_UP: given[GATE_UP]}, tmp_path / "model.safetensors")
    param = torch.empty(640, 64)
    open_weights(tmp_path, maps).load({"gate_up": Pieces.of(param)})
    assert torch.equal(param, tensor.load(given[GATE_UP])) and layout.seen == [2, 2, 1, 5]
    save_model(tmp_path / "out", export({"gate_up": Pieces.of(param)}, maps))
    assert layout.seen[4:] == [2, 2, 1]
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[GATE_UP], given[GATE_UP])


@pytest.mark.usefixtures("small")
def test_a_part_reads_its_experts_alone(tmp_path: Path) -> None:
    given, layout = stored(), Watched(Stacked(128, Transposed()))
    maps = [WeightMap("gate_up", (HFTensor(GATE_UP, (5, 64, 128), layout),))]
    save_file({GATE_UP: given[GATE_UP]}, tmp_path / "model.safetensors")
    whole, part = layout.of.load(given[GATE_UP]).view(-1), torch.empty(9000)
    open_weights(tmp_path, maps).load({"gate_up": Pieces((640, 64), 2 * 8192 + 100, [part[:50], part[50:]])})
    assert torch.equal(part, whole[2 * 8192 + 100 :][:9000]) and layout.seen == [2]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_write_their_ranges_and_the_model_is_made_of_them(processes: int, tmp_path: Path) -> None:
    saved, output = tmp_path / "saved", tmp_path / "output"
    saved.mkdir()
    output.mkdir()
    for process, held in enumerate(parts(rows(), processes)):
        write_ranges(saved, export(held, max_shard_bytes=400_000), process)
    assert set(in_rows(saved)) == with_layouts(MAPS).keys() and len(in_rows(saved)) == 4
    join_ranges(output, saved, with_layouts(MAPS))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert IN_ROWS not in index["metadata"] and len(set(index["weight_map"].values())) > 1
    found = {name: x for path in output.glob("*.safetensors") for name, x in load_file(path).items()}
    given = stored()
    assert found.keys() == given.keys() and all(torch.equal(found[name], x) for name, x in given.items())


def test_what_several_processes_wrote_is_resumed_by_any_number(tmp_path: Path) -> None:
    for process, held in enumerate(parts(rows(), 2)):
        write_ranges(tmp_path, export(held), process)
    given = rows()
    found = {name: torch.empty_like(param) for name, param in given.items()}
    for held in parts(found, 3):
        load_model(tmp_path, MAPS, held)
    assert all(torch.equal(found[name], param) for name, param in given.items())
    wrong = [replace(m, tensors=tuple(replace(t, layout=None) for t in m.tensors)) for m in MAPS]
    with pytest.raises(ConfigError, match=rf"{GATE_UP} is \[640, 64\], expected \[5, 64, 128\]"):
        load_model(tmp_path, wrong, {})


def test_an_export_without_the_package_of_the_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUROGATE_PLUGINS", "-models_gptoss")
    for process, held in enumerate(parts(rows(), 2)):
        write_ranges(tmp_path, export(held), process)
    with pytest.raises(ConfigError, match=rf"has {GATE_UP} in the order .* builds GptOssForCausalLM. .* --config PATH"):
        moved_in(tmp_path, in_rows(tmp_path), load_registry(files=()))


def test_a_stack_whose_layout_lacks_leading_is_no_matter_of_several_processes() -> None:
    class Whole(Stacked):
        leading = False

    layout = Whole(128, Transposed())
    tensor = HFTensor(GATE_UP, (5, 64, 128), layout)
    assert [part.indices for part in moved_tensors.parts_of(tensor)] == [slice(0, 5)]
    shard: Any = SimpleNamespace(name="gate_up", shard=True)
    plan: Any = SimpleNamespace(assembly=SimpleNamespace(weights=[WeightMap("gate_up", (tensor,))]))
    saved = SavedRun(run=Any, plan=plan, facts={}, extends=bool, versions={}, metrics=Path("none"))  # type: ignore[arg-type]
    object.__setattr__(saved, "weights", [shard])
    with pytest.raises(ConfigError, match=f"{GATE_UP} is a stack of .* a layout without `leading`"):
        saved.refuse_ranges(2)
    plan.assembly.weights = [WeightMap("gate_up", (replace(tensor, layout=Stacked(128, Transposed())),))]
    saved.refuse_ranges(2)
