"""Weights in FP8 in the files of a checkpoint: their values, their pieces, and files that are refused before a read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import of_fp8, quantization_config, to_fp8, write_shards
from safetensors.torch import save_file
from torch import Tensor

from surogate.checkpoints import formed_weights
from surogate.checkpoints.formed_weights import all_formed
from surogate.checkpoints.stored_weights import StoredWeights, locate, open_weights
from surogate.runs.published_form import form_of
from surogate_core.api import CheckpointFormDef, ConfigError, HFTensor, ProgramError, WeightMap
from surogate_core.errors import PluginError
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import Registry
from surogate_core.runtime.pieces import Pieces
from surogate_models.api import Interleaved, Transposed

SHAPES = {"a.weight": (300, 200), "b.weight": (100, 200), "c.weight": (7, 130)}
MAPS = [
    WeightMap("ab", (HFTensor("a.weight", (300, 200)), HFTensor("b.weight", (100, 200)))),
    WeightMap("c", (HFTensor("c.weight", (7, 130)),)),
    WeightMap("norm", (HFTensor("norm.weight", (200,)),)),
]
BLOCKS = ([128, 128], [64, 64], [48, 32], [1, 128], [1000, 1000], None)


def files(block: list[int] | None, scales: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a checkpoint of SHAPES, with a norm in bf16."""
    torch.manual_seed(0)
    found = {"norm.weight": torch.randn(200).bfloat16()}
    for name, shape in SHAPES.items():
        found[name], found[f"{name}_scale_inv"] = to_fp8(torch.randn(shape), block, scales)
        if block is None:
            found[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5)
    return found


def written(folder: Path, tensors: Mapping[str, Tensor], block: list[int] | None) -> Path:
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    write_shards(folder, [{name: tensors[name] for name in names[at::2]} for at in (0, 1)])
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization_config(block)}))
    return folder


def opened(folder: Path, maps: Any = MAPS, **more: Any) -> StoredWeights:
    config = json.loads((folder / "config.json").read_text())
    return open_weights(folder, maps, form=form_of(load_registry(), folder, config), **more)


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16, maps: Any = MAPS) -> dict[str, Tensor]:
    params = {
        m.param: torch.full((sum(t.rows[0] for t in m.tensors), *m.tensors[0].rows[1:]), torch.nan, dtype=dtype)
        for m in maps
    }
    opened(folder, maps).load({name: Pieces.of(param) for name, param in params.items()})
    return params


def values(tensors: Mapping[str, Tensor], block: list[int] | None) -> dict[str, Tensor]:
    """The params by definition, in fp32."""
    of = {name: of_fp8(tensors[name], tensors[f"{name}_scale_inv"], block) for name in SHAPES}
    return {"ab": torch.cat([of["a.weight"], of["b.weight"]]), "c": of["c.weight"], "norm": tensors["norm.weight"]}


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_weight_is_its_code_times_the_scale_of_its_block_rounded_once(
    block: list[int] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = files(block)
    found = loaded(written(tmp_path, tensors, block), dtype)
    for name, value in values(tensors, block).items():
        assert torch.equal(found[name], value.to(dtype)), name


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [[128, 128], None])
def test_scales_may_be_in_other_dtypes(block: list[int] | None, scales: torch.dtype, tmp_path: Path) -> None:
    tensors = files(block, scales)
    assert torch.equal(loaded(written(tmp_path, tensors, block), torch.float32)["c"], values(tensors, block)["c"])


def test_every_code_has_its_value(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
    finite = codes.float().nan_to_num().to(codes.dtype)
    save_file({"x.weight": finite, "x.weight_scale_inv": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization_config(None)}))
    found = loaded(tmp_path, maps=[WeightMap("x", (HFTensor("x.weight", (2, 128)),))])["x"]
    assert torch.equal(found.float(), finite.float())


@pytest.mark.parametrize("piece", [200, 1 << 14])
@pytest.mark.parametrize("block", [[128, 128], [48, 32], None])
def test_several_processes_read_their_own_elements_and_no_others(
    block: list[int] | None, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ranges begin and end inside of rows and blocks. `piece`: elements that are read at a time."""
    tensors = files(block)
    weights, whole = opened(written(tmp_path, tensors, block)), values(tensors, block)["ab"].bfloat16()
    monkeypatch.setattr(formed_weights, "PIECE", piece)
    bounds = [0, 7_777, 40_001, 60_500, whole.numel()]
    for first, last in pairwise(bounds):
        flat = torch.full((last - first,), torch.nan, dtype=torch.bfloat16)
        cut = [flat[:1234], flat[1234:]]
        weights.load({"ab": Pieces(tuple(whole.shape), first, cut)})
        assert torch.equal(flat, whole.view(-1)[first:last]), (first, last)


def test_only_the_rows_that_are_wanted_are_read_and_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = opened(written(tmp_path, files([128, 128]), [128, 128]))
    assert weights.formed.form is not None
    (form, config), asked = weights.formed.form, list[tuple[str, range]]()

    def read(tensor: HFTensor, parts: Any, rows: range, config: Any) -> Tensor:
        asked.append((tensor.name, rows))
        result: Tensor = form.read(tensor, parts, rows, config)
        return result

    monkeypatch.setattr(formed_weights, "PIECE", 130 * 200)
    weights = replace(weights, formed=replace(weights.formed, form=(replace(form, read=read), config)))
    weights.load({"ab": Pieces((400, 200), 10 * 200, [torch.empty(300 * 200)])})
    of_a = [("a.weight", range(10, 138)), ("a.weight", range(138, 266)), ("a.weight", range(266, 300))]
    assert sorted(asked, key=str) == sorted([*of_a, ("b.weight", range(10))], key=str)


def test_layouts_move_what_was_read(tmp_path: Path) -> None:
    maps = [
        WeightMap("a", (HFTensor("a.weight", (300, 200), Interleaved(2)),)),
        WeightMap("b", (HFTensor("b.weight", (100, 200), Transposed()),)),
        *MAPS[1:],
    ]
    tensors = files([128, 128])
    found, of = loaded(written(tmp_path, tensors, [128, 128]), maps=maps), values(tensors, [128, 128])["ab"].bfloat16()
    assert torch.equal(found["a"], torch.cat([of[:300:2], of[1:300:2]]))
    assert torch.equal(found["b"], of[300:].T)


def test_a_tensor_in_floating_point_is_read_as_it_stands(tmp_path: Path) -> None:
    tensors = files([128, 128])
    del tensors["c.weight_scale_inv"]
    tensors["c.weight"] = torch.randn(7, 130).bfloat16()
    assert torch.equal(loaded(written(tmp_path, tensors, [128, 128]))["c"], tensors["c.weight"])


def test_a_copy_is_compared_with_what_was_read(tmp_path: Path) -> None:
    tensors = files([128, 128])
    tensors["copy"] = values(tensors, [128, 128])["c"]
    opened(written(tmp_path, tensors, [128, 128]), copies={"copy": "c.weight"})
    tensors["copy"][3, 4] += 1
    with pytest.raises(ConfigError, match=r"copy differs from c\.weight in 1 of 910 elements, first at \[3, 4\]"):
        opened(written(tmp_path, tensors, [128, 128]), copies={"copy": "c.weight"})


# ------------------------------------------------------------------------------------------------------------ bad files


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, tensor: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor(tensors[name])})


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x.view(-1)[0] = value
        return x

    return change


SCALE = "a.weight_scale_inv"
FAULTS: list[tuple[str, list[int] | None, Callable[[dict[str, Tensor]], object], str]] = [
    (
        "a missing scale",
        [128, 128],
        without(SCALE),
        r"model-0000\d-of-00002\.safetensors: a\.weight needs a\.weight_scale_inv, which the checkpoint lacks: "
        r"a\.weight is stored in FP8 \(E4M3\) with a scale for each block of weights\. Download",
    ),
    ("a missing scale of a tensor", None, without(SCALE), r"a\.weight needs a\.weight_scale_inv"),
    ("a missing weight", [128, 128], without("a.weight"), r"a\.weight_scale_inv needs a\.weight, which the checkpoint"),
    (
        "a missing weight with its scale",
        [128, 128],
        lambda tensors: (tensors.pop("a.weight"), tensors.pop(SCALE)),
        r"the checkpoint lacks a\.weight, which config\.json asks for",
    ),
    (
        "a missing norm",
        [128, 128],
        without("norm.weight"),
        r"the checkpoint lacks norm\.weight, which config\.json asks for",
    ),
    (
        "a scale of nothing",
        [128, 128],
        lambda tensors: tensors.update({"z.weight_scale_inv": torch.ones(1, 1)}),
        r"holds z\.weight_scale_inv, which a model of this config\.json does not have",
    ),
    (
        "a scale beside a weight in bf16",
        [128, 128],
        changed("a.weight", Tensor.bfloat16),
        r"holds a\.weight_scale_inv, which a model of this config\.json does not have",
    ),
    (
        "a scale under another name",
        [128, 128],
        lambda tensors: tensors.update({"a.weight_scale": tensors.pop(SCALE)}),
        r"a\.weight needs a\.weight_scale_inv",
    ),
    (
        "a scale under another name too",
        [128, 128],
        lambda tensors: tensors.update({"a.weight_scale": tensors[SCALE].clone()}),
        r"holds a\.weight_scale, which",
    ),
    (
        "a tensor that nothing reads",
        None,
        lambda tensors: tensors.update({"extra": torch.ones(2)}),
        r"holds extra, which a model of this config\.json does not have",
    ),
    (
        "an activation scale that blocks do not have",
        [128, 128],
        lambda tensors: tensors.update({"a.activation_scale": torch.tensor(1.0)}),
        r"holds a\.activation_scale, which",
    ),
    (
        "a grid that is turned",
        [128, 128],
        changed(SCALE, lambda x: x.T.contiguous()),
        r"a\.weight_scale_inv is F32 \[2, 3\], expected F32 or BF16 or F8_E8M0 \[3, 2\] beside a\.weight ",
    ),
    (
        "a grid of whole blocks alone",
        [128, 128],
        changed(SCALE, lambda x: x[:2].clone()),
        r"F32 \[2, 2\], expected .* \[3, 2\]",
    ),
    ("a grid for one scale", None, changed(SCALE, lambda x: x.reshape(1, 1)), r"F32 \[1, 1\], expected .* \[\] beside"),
    ("one scale for a grid", [128, 128], changed(SCALE, lambda x: x[0, 0].clone()), r"F32 \[\], expected .* \[3, 2\]"),
    (
        "scales in integers",
        [128, 128],
        changed(SCALE, lambda x: x.int()),
        r"a\.weight_scale_inv is I32 \[3, 2\], expected F32",
    ),
    (
        "another FP8",
        [128, 128],
        changed("a.weight", lambda x: x.float().to(torch.float8_e5m2)),
        r"a\.weight is F8_E5M2 \[300, 200\], expected F8_E4M3 \[300, 200\] in FP8",
    ),
    (
        "a weight of another shape",
        [128, 128],
        changed("a.weight", lambda x: x[:, :100].clone()),
        r"a\.weight is F8_E4M3 \[300, 100\], expected F8_E4M3 \[300, 200\]",
    ),
    (
        "a scale that is NaN",
        [128, 128],
        changed(SCALE, with_first(torch.nan)),
        r"a\.weight_scale_inv \[3, 2\]: 1 NaN of 6",
    ),
    ("a scale that is inf", None, changed(SCALE, with_first(torch.inf)), r"a\.weight_scale_inv \[\]: 1 inf of 1"),
    (
        "a norm in FP8",
        [128, 128],
        changed("norm.weight", lambda x: x.to(torch.float8_e4m3fn)),
        r"norm\.weight is \[200\]; only a matrix has blocks",
    ),
]


@pytest.mark.parametrize(("block", "fault", "message"), [x[1:] for x in FAULTS], ids=[x[0] for x in FAULTS])
def test_files_that_do_not_fit_are_refused_before_a_weight_is_read(
    block: list[int] | None, fault: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    tensors = files(block)
    fault(tensors)
    with pytest.raises(ConfigError, match=message):
        opened(written(tmp_path, tensors, block))


def test_a_code_that_is_no_number_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tensors = files([128, 128])
    tensors["a.weight"][257, 3] = torch.nan
    weights = opened(written(tmp_path, tensors, [128, 128]))
    with pytest.raises(ConfigError, match=r"hold NaN or inf.*\n.*safetensors: a\.weight \[300, 200\].*: 1 NaN of"):
        weights.load({"ab": Pieces.of(torch.empty(400, 200))})


# -------------------------------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "fp8"}, "fp8_blocks"),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, "fp8_blocks"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8_tensor"),
        ({"quant_method": "gptq"}, None),
        ({}, None),
    ],
)
def test_the_config_says_which_form_it_is(config: dict[str, Any], name: str | None, tmp_path: Path) -> None:
    """transformers takes squares of 128 where no size is named."""
    form = form_of(load_registry(), tmp_path, {"quantization_config": config})
    assert (form and form[0].name) == name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\], not the rows and columns of a block"),
        ({"weight_block_size": 128}, "weight_block_size is 128"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'; only fp8 can be read"),
        ({"weight_block_size": None, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ],
)
def test_a_config_that_a_form_cannot_read_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: quantization_config: {message}"):
        form_of(load_registry(), tmp_path, {"quantization_config": {"quant_method": "fp8", **config}})


def test_two_forms_that_match_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = load_registry().checkpoint_forms()
    twin = replace(forms["fp8_blocks"], name="twin")
    monkeypatch.setattr(Registry, "checkpoint_forms", lambda registry: {**forms, "twin": twin})
    with pytest.raises(PluginError, match=r"config: both checkpoint form \w+ of surogate-qlora-fp8 .* read it"):
        form_of(load_registry(), tmp_path, {"quantization_config": {"quant_method": "fp8"}})


# ---------------------------------------------------------------------------------------------- forms of other plugins


def read_halves(tensor: HFTensor, parts: Any, rows: range, config: Any) -> Tensor:
    high, low = (parts[f"{tensor.name}_{half}"][rows.start : rows.stop].float() for half in ("high", "low"))
    return high + low


HALVES = CheckpointFormDef(
    name="halves",
    summary="two halves",
    matches=lambda config: config.get("quant_method") == "halves",
    parts=lambda tensor, config: [
        formed_weights.Part(f"{tensor.name}_{half}", tensor.shape, ("bf16",)) for half in ("high", "low")
    ],
    read=read_halves,
)
"""A form whose tensors have other names than the weight."""


def halves(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {f"c.weight_{half}": torch.randn(7, 130).bfloat16() for half in ("high", "low")}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_no_part_needs_the_name_of_the_weight(tmp_path: Path) -> None:
    tensors = halves(tmp_path)
    param = torch.empty(7, 130)
    open_weights(tmp_path, MAPS[1:2], form=(HALVES, {})).load({"c": Pieces.of(param)})
    assert torch.equal(param, tensors["c.weight_high"].float() + tensors["c.weight_low"].float())
    found = all_formed(tmp_path, locate(tmp_path), (HALVES, {}), MAPS[1].tensors)
    assert (
        found.tensors.keys() == {"c.weight"} and found.leaves_out("c.weight_low") and not found.leaves_out("c.weight")
    )


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda x: x[:1], r"torch\.float32 \[1, 130\] for 7 rows"),
        (lambda x: x.int(), r"torch\.int32 \[7, 130\]"),
        (lambda x: None, "a NoneType"),
    ],
)
def test_a_form_that_returns_something_else_is_named(
    result: Callable[[Tensor], Any], found: str, tmp_path: Path
) -> None:
    halves(tmp_path)
    form = replace(HALVES, read=lambda *given: result(read_halves(*given)))
    weights = open_weights(tmp_path, MAPS[1:2], form=(form, {}))
    with pytest.raises(ProgramError, match=f"read: returned {found}.*, expected floats"):
        weights.load({"c": Pieces.of(torch.empty(7, 130))})
