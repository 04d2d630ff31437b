"""The numerics report on the CPU: its micro-step changes nothing, and its figures are those of the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_model import BIASED, CONFIG, LAYERS, PRODUCTS, Model, differing, kinds, lora_rank_8, operands_under_bf16
from torch import Tensor

from surogate_core.api import ConfigError, Program
from surogate_core.assembly.recomputed import PARTS
from surogate_recipes_fp8.formats import COLUMNS, LARGEST
from surogate_recipes_fp8.reference import fp8_report, scale_of

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SPACING = {"e4m3": 32.0, "e5m2": 8192.0}
"""Distance of the largest numbers of a format."""


def micro_step(model: Model, seed: int, after: Any = None) -> None:
    """Run the first micro-step of an optimizer step, with the report."""
    model.write(seed)
    program = model.assembly.micro_step(first=True, last=False, purpose="report")
    model.executor.walk(program.name, (lambda index: after(program, index)) if after else (lambda index: None))


def trained(steps: int = 2, **settings: Any) -> Model:
    model = Model(settings.pop("config", CONFIG), numerics=True, **settings)
    for _ in range(steps):
        model.step()
    return model


def figures(model: Model) -> dict[str, dict[str, float]]:
    """Return {tensor: {column: figure}} of the last report."""
    numerics = model.assembly.numerics
    assert numerics is not None
    rows = model.view(numerics.values).tolist()
    names = [column.name for column in numerics.columns]
    return {t.name: dict(zip(names, row, strict=True)) for t, row in zip(numerics.tensors, rows, strict=True)}


SETTINGS: dict[str, Any] = {
    "qwen3": {},
    "biases": {"config": BIASED},
    "lora": lora_rank_8(),
    "recomputed": {"recompute": frozenset(PARTS)},
    "under bf16": operands_under_bf16(),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_reported_micro_step_computes_the_same_bits(settings: dict[str, Any]) -> None:
    plain, reported = trained(**settings), trained(**settings)
    plain.micro_step(True, 5)
    micro_step(reported, 5)
    both = [
        {name: t for name, t in m.named("grad", "state").items() if name != "fp8.numerics"} for m in (plain, reported)
    ]
    assert differing(*both) == []
    assert all(row["amax"] > 0 for row in figures(reported).values())


def test_every_quantized_tensor_is_reported_once() -> None:
    rows = figures(trained(0))
    assert len(rows) == 3 * PRODUCTS * LAYERS
    assert [name for name in rows if name.startswith("layers.1.mlp.down")] == [
        "layers.1.mlp.down.x",
        "layers.1.mlp.down.dy",
        "layers.1.mlp.down",
    ]
    frozen = figures(trained(0, **lora_rank_8()))
    assert frozen and all(name.endswith((".x", ".dy")) for name in frozen)


def test_figures_are_those_of_the_tensors() -> None:
    """What is lost is decided by torch's rounding, what is clipped by rounding to a multiple of the spacing."""
    model = trained()
    for name in ("layers.0.attn.qkv.x", "layers.2.mlp.down.dy"):  # scales that clip, and that lose
        scale = model.state(f"fp8.{name}.scale")
        scale.copy_(torch.stack([1 / (factor := scale[1] * (7.0 if name.endswith("x") else 1e-9)), factor]))
    expected: dict[int, tuple[float, float, float, float]] = {}

    def watch(program: Program, index: int) -> None:
        op = program.ops[index]
        if op.kind == "fp8_count":
            x, scale = (model.buffers.view(v, program.name).clone() for v in op.ins)
            expected[len(expected)] = by_torch(x, scale, op.attrs["dtype"])

    micro_step(model, 5, watch)
    rows = figures(model)
    assert len(rows) == len(expected)
    for row, (amax, used, clipped, lost) in zip(rows.values(), expected.values(), strict=True):
        assert row["amax"] == amax and row["range"] == pytest.approx(used, rel=1e-6)
        assert row["clipped"] == pytest.approx(clipped, rel=1e-6) and row["lost"] == pytest.approx(lost, rel=1e-6)
    assert rows["layers.0.attn.qkv.x"]["clipped"] > 0.01 and rows["layers.0.attn.qkv.x"]["range"] > 2
    assert rows["layers.2.mlp.down.dy"]["lost"] > 0.5


def by_torch(x: Tensor, scale: Tensor, dtype: str) -> tuple[float, float, float, float]:
    """(amax, share of the range, clipped, lost) of a tensor."""
    wide = x.float() * scale[1]
    q = wide.to(FP8[dtype]).float()
    nonzero = x != 0
    amax = float(x.float().abs().max())
    clipped = ((wide.abs() / SPACING[dtype]).round() * SPACING[dtype] > LARGEST[dtype]).float().mean()
    lost = ((q == 0) & nonzero).sum() / nonzero.sum()
    return amax, amax * float(scale[1]) / LARGEST[dtype], float(clipped), float(lost)


def age(history: list[float], made_from: float, maximum: float = 448.0) -> float:
    """The age of a scale that was made from the magnitude `made_from`."""
    seen, scale = torch.tensor(history)[:, None], scale_of(torch.tensor(made_from), maximum)
    tensors = [torch.tensor([1.0, 0.0]), torch.zeros(3, dtype=torch.int64), scale]
    table = fp8_report(seen, *tensors, sizes=(16,), maxima=(maximum,), columns=(0,), history=True)
    return float(table[0, [column.name for column in COLUMNS].index("age")])


@pytest.mark.parametrize(
    ("history", "made_from", "expected"),
    [
        ([0.0, 1.0, 4.0, 2.0], 4.0, 2),
        ([0.0, 1.0, 4.0, 4.0], 4.0, 1),  # the newest of equal ones
        ([0.0, 1.0, 3.0, 2.0], 9.0, 4),  # it has just left the history
        ([0.0], 5.0, 1),
    ],
)
def test_the_age_of_a_scale_counts_steps(history: list[float], made_from: float, expected: int) -> None:
    assert age(history, made_from) == expected


def test_a_scale_grows_old_while_its_magnitude_is_the_largest() -> None:
    model = trained(1)
    ages = []
    for _ in range(3):
        micro_step(model, 5)
        ages.append({name: row["age"] for name, row in figures(model).items()})
        for name in [n for n in ages[-1] if n.endswith((".x", ".dy"))]:
            amax = model.state(f"fp8.{name}.amax")
            amax.copy_(amax * 1e-3)  # smaller than what made the scale
        model.update(0.0)
    assert [{age for name, age in found.items() if name.endswith(".x")} for found in ages] == [{1}, {2}, {3}]
    assert {found["layers.0.mlp.down"] for found in ages} == {0}


def test_no_report_program_exists_unless_it_is_asked_for() -> None:
    plain, reporting = Model().assembly, trained(0).assembly
    assert plain.numerics is None and plain.programs.keys() | {"report_first"} == reporting.programs.keys()
    assert not {"fp8_count", "fp8_report"} & {kind for p in plain.programs.values() for kind in kinds(p)}
    assert "fp8.numerics" not in {v.name for v in plain.declared}


def test_a_recipe_without_a_report_refuses_the_key() -> None:
    with pytest.raises(ConfigError, match="numerics_report_steps: bf16 has no numerics report"):
        Model(fp8=False, numerics=True)
