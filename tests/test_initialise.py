"""How params start when nothing is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.errors import ProgramError
from surogate_core.program.value import Init, Value
from surogate_core.runtime.initialise import initialise

WIDE = Value("wide", (400, 500), "fp32", "param", init=Init(kind="normal", std=0.02))
OUT = Value("out", (30, 20), "fp32", "param", init=Init(kind="normal", std=0.02, residual_projection=True))
NORM = Value("norm", (30,), "fp32", "param", init=Init(kind="ones"))
SCALE = Value("scale", (2,), "fp32", "state", init=Init(kind="constant", value=0.5))
MASTER = Value("master", (3,), "fp32", "state")


def initialised(*values: Value, seed: int = 1, zero_projections: bool = False) -> dict[str, Tensor]:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    tensors = {v.name: torch.full(v.shape, 7.0, dtype=dtypes[v.dtype]) for v in values}
    initialise(values, lambda v: tensors[v.name], seed, zero_projections)
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


def test_constants_and_zeroed_projections() -> None:
    tensors = initialised(WIDE, OUT, NORM, SCALE, MASTER, zero_projections=True)
    assert not tensors["out"].any()
    assert tensors["wide"].any()
    assert (tensors["norm"] == 1).all()
    assert (tensors["scale"] == 0.5).all()
    assert (tensors["master"] == 7).all(), "a state without init is a program's to write"


def test_a_param_without_init_is_refused() -> None:
    with pytest.raises(ProgramError, match="no init"):
        initialised(Value("w", (2,), "fp32", "param"))
