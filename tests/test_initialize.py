"""How params start when nothing is loaded."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.program.value import Init, Value
from surogate_core.runtime.initialize import chunks, initialize

WIDE = Value("wide", (400, 500), "fp32", "param", init=Init(kind="normal", std=0.02))
OUT = Value("out", (30, 20), "fp32", "param", init=Init(kind="normal", std=0.02, residual_projection=True))
NORM = Value("norm", (30,), "fp32", "param", init=Init(kind="ones"))
SCALE = Value("scale", (2,), "fp32", "state", init=Init(kind="constant", value=0.5))
DECAY = Init(kind="log_uniform", low=0.01, high=16.0)
MASTER = Value("master", (3,), "fp32", "state")


def initialised(*values: Value, seed: int = 1, zero_projections: bool = False) -> dict[str, Tensor]:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    tensors = {v.name: torch.full(v.shape, 7.0, dtype=dtypes[v.dtype]) for v in values}
    initialize(values, lambda v: tensors[v.name], seed, zero_projections)
    return tensors


def test_draws_depend_on_seed_and_name_not_on_order() -> None:
    one, other = initialised(WIDE, OUT, NORM), initialised(OUT, WIDE)
    assert all(torch.equal(one[name], other[name]) for name in ("wide", "out"))
    assert not torch.equal(one["wide"], initialised(WIDE, seed=2)["wide"])
    assert not torch.equal(one["wide"].view(-1)[:600], one["out"].view(-1))


def test_normal_draws_have_the_asked_deviation() -> None:
    """200,000 draws: the deviation is known to 0.16%, the mean to 4.5e-5; bounds of six of those."""
    wide = initialised(WIDE)["wide"]
    assert wide.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(wide.mean().item()) < 3e-4


def test_bf16_params_are_the_rounded_fp32_ones() -> None:
    narrow = Value("wide", (400, 500), "bf16", "param", init=WIDE.init)
    assert torch.equal(initialised(narrow)["wide"], initialised(WIDE)["wide"].bfloat16())


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 2**20 + 5, 2**20 + 16, 2**21 + 33, 2**24 + 3])
def test_threads_and_chunks_draw_the_bits_of_one_thread(kind: str, n: int) -> None:
    """The exported weights of a seed are a promise: of 2^24 numbers at once, by one generator, as they always were."""
    value = Value("w", (n,), "bf16", "param", init=Init(kind=kind, std=0.02, bound=0.3))
    generator, drawn = torch.Generator().manual_seed(crc32(b"1/w")), torch.empty(n)
    for part in torch.split(drawn, 1 << 24):
        if kind == "normal":
            part.normal_(0.0, 0.02, generator=generator)
        else:
            part.uniform_(-0.3, 0.3, generator=generator)
    threads = torch.get_num_threads()
    assert torch.equal(initialised(value, WIDE)["w"], drawn.bfloat16())
    assert torch.get_num_threads() == threads


def test_the_chunks_of_a_draw_cover_it_and_none_is_drawn_in_another_way() -> None:
    for n in (1, 2**20 + 1, 2**20 + 15, 2**20 + 16, 2**24, 2**24 + 1, 2**24 + 2**20 + 15, 3 * 2**24):
        parts = list(chunks(n))
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])] and parts[-1][1] == n
        whole = min(n, 2**24)
        assert all(stop - start >= 16 for start, stop in parts if stop <= whole) or whole < 16


def test_constants_and_zeroed_projections() -> None:
    tensors = initialised(WIDE, OUT, NORM, SCALE, MASTER, zero_projections=True)
    assert not tensors["out"].any()
    assert tensors["wide"].any()
    assert (tensors["norm"] == 1).all()
    assert (tensors["scale"] == 0.5).all()
    assert (tensors["master"] == 7).all(), "a state without init is a program's to write"


def test_a_logarithm_of_a_uniform_number_has_the_bits_of_its_formula() -> None:
    """log(u) of u in [0.01, 16): rounded once from fp64, whatever computes it."""
    drawn = initialised(Value("w", (30, 50), "fp32", "param", init=DECAY))["w"].view(-1)
    generator = torch.Generator().manual_seed(crc32(b"1/w"))
    u = torch.empty(1500).uniform_(0.01, 16.0, generator=generator)
    assert drawn.tolist() == [float(torch.tensor(math.log(x))) for x in u.tolist()]
    assert math.log(0.01) <= drawn.min() < -3.0 and 2.7 < drawn.max() < math.log(16.0)


@pytest.mark.parametrize("n", [17, 2**20 + 5, 2**20 + 16])
def test_chunks_of_logarithms_have_the_bits_of_a_whole(n: int) -> None:
    u = torch.empty(n).uniform_(0.01, 16.0, generator=torch.Generator().manual_seed(crc32(b"1/w")))
    found = initialised(Value("w", (n,), "bf16", "param", init=DECAY), WIDE)["w"]
    assert torch.equal(found, u.double().log().float().bfloat16())


def test_values_are_those_of_rows() -> None:
    third = Init(kind="values", values=(1.0, 1 / 3, -2.5))
    shapes = {"heads": (3,), "rows": (3, 4), "stack": (3, 2, 2)}
    found = initialised(*(Value(name, shape, "bf16", "param", init=third) for name, shape in shapes.items()))
    for name, shape in shapes.items():
        rows = torch.tensor([1.0, 1 / 3, -2.5], dtype=torch.float64).bfloat16()
        assert torch.equal(found[name].view(3, -1), rows[:, None].expand(3, math.prod(shape[1:])))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (), (1, 3)])
def test_another_number_of_values_than_rows_is_refused_by_name(shape: tuple[int, ...]) -> None:
    rows = shape[0] if shape else 0
    says = rf"init of param 'a_log' \[.*\] has 3 values, expected one for each of its {rows} rows"
    with pytest.raises(ProgramError, match=rf"test_initialize.py:\d+: {says}"):
        Builder({}, "fp32").param("a_log", shape, Init(kind="values", values=(1.0, 2.0, 3.0)))


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "log_uniform", "low": 0.0, "high": 1.0},
        {"kind": "log_uniform", "low": 2.0, "high": 1.0},
        {"kind": "log_uniform", "low": 1.0, "high": math.inf},
        {"kind": "log_uniform", "low": 1.0, "high": math.nan},
        {"kind": "log_uniform", "bound": 1.0},
        {"kind": "values"},
        {"kind": "values", "values": [1.0, 2.0]},
        {"kind": "values", "values": (1.0, math.nan)},
        {"kind": "values", "value": 1.0},
    ],
)
def test_contents_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        ProgramError, match=rf"Init\(kind='{given['kind']}', .*log_uniform with 0 < low < high or values"
    ):
        Init(**given)


def test_the_text_of_contents_has_further_fields_where_they_are_set() -> None:
    assert repr(Init(kind="normal", std=0.5)) == (
        "Init(kind='normal', std=0.5, bound=0.0, value=0.0, residual_projection=False)"
    )
    assert "value=0.0, low=0.01, high=16.0, residual_projection=False)" in repr(DECAY)
    assert "value=0.0, values=(1.0, 2.0), residual" in repr(Init(kind="values", values=(1.0, 2.0)))


def test_a_param_without_init_is_refused() -> None:
    with pytest.raises(ProgramError, match="no init"):
        initialised(Value("w", (2,), "fp32", "param"))
