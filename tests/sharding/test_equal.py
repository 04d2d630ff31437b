"""Ranks that divide states, gradients or weights train the bits of ranks that hold all of them."""

from __future__ import annotations

from typing import Any

import pytest
from models.harness import OPS, tiny_config
from sharding.ranks import assert_equal, trained

from surogate_core.api import NoOptions, PrecisionRequest
from surogate_core.program.shards import Sharding
from surogate_optim_adamw_8bit.optimizer import ADAMW_8BIT, ADAMW_8BIT_OP, AdamW8bitOptions
from surogate_optim_normuon.optimizer import NORMUON, NORMUON_OP, NorMuonOptions
from surogate_recipes_bf16.recipe import BF16

CONFIG = tiny_config(num_hidden_layers=2)
EVERY = {**OPS, ADAMW_8BIT_OP.kind: ADAMW_8BIT_OP, NORMUON_OP.kind: NORMUON_OP}


def optimizer(name: str) -> dict[str, Any]:
    return {
        "adamw": {},
        "adamw_8bit": {"optimizer": ADAMW_8BIT, "optimizer_options": AdamW8bitOptions()},
        "normuon": {"optimizer": NORMUON, "optimizer_options": NorMuonOptions()},
    }[name]


def precision(**request: Any) -> dict[str, Any]:
    return {"precision": BF16.precision(PrecisionRequest(**request), NoOptions())}


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "normuon"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_divided_states_give_the_bits_of_data_parallelism(ranks: int, name: str, micro_steps: int) -> None:
    given = {"micro_steps": micro_steps, "ops": EVERY, "weight_decay": 0.1, "max_grad_norm": 1.0, **optimizer(name)}
    parallel = trained(CONFIG, ranks, Sharding(parts=ranks), **given)
    divided = trained(CONFIG, ranks, Sharding(parts=ranks, states=True), **given)
    assert_equal(divided, parallel)


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "normuon"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_weights_give_the_bits_of_data_parallelism(ranks: int, name: str, micro_steps: int) -> None:
    given = {"micro_steps": micro_steps, "ops": EVERY, "weight_decay": 0.1, "max_grad_norm": 1.0, **optimizer(name)}
    parallel = trained(CONFIG, ranks, Sharding(parts=ranks), **given)
    divided = trained(CONFIG, ranks, Sharding(parts=ranks, states=True, weights=True), **given)
    assert_equal(divided, parallel)
    assert divided.assembly.memory.segments["param"].nbytes < parallel.assembly.memory.segments["param"].nbytes
