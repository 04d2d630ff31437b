"""Ranks that divide states, gradients or weights train the bits of ranks that hold all of them."""

from __future__ import annotations

from functools import cache
from typing import Any
from zlib import crc32

import pytest
import torch
from models.harness import OPS, tiny_config
from sharding.ranks import Trained, assert_equal, summed, trained
from torch import Tensor

from surogate_core.api import NoOptions, Op, PrecisionRequest
from surogate_core.program.shards import Sharding
from surogate_core.reference.ops import accumulate_rounded
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


def run(ranks: int, name: str, micro_steps: int, **divided: Any) -> Trained:
    given = {"micro_steps": micro_steps, "ops": EVERY, "weight_decay": 0.1, "max_grad_norm": 1.0, **optimizer(name)}
    return trained(CONFIG, ranks, Sharding(parts=ranks, **divided), **given)


@cache
def data_parallel(ranks: int, name: str, micro_steps: int) -> Trained:
    """Train ranks that hold all, once for all tests that compare with them."""
    return run(ranks, name, micro_steps)


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "normuon"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_divided_states_give_the_bits_of_data_parallelism(ranks: int, name: str, micro_steps: int) -> None:
    assert_equal(run(ranks, name, micro_steps, states=True), data_parallel(ranks, name, micro_steps))


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "normuon"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_weights_give_the_bits_of_data_parallelism(ranks: int, name: str, micro_steps: int) -> None:
    parallel = data_parallel(ranks, name, micro_steps)
    divided = run(ranks, name, micro_steps, states=True, weights=True)
    assert_equal(divided, parallel)
    assert divided.assembly.memory.segments["param"].nbytes < parallel.assembly.memory.segments["param"].nbytes


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "normuon"])
def test_whole_blocks_of_divided_weights_give_the_bits_of_data_parallelism(name: str, gradients: bool) -> None:
    parallel = data_parallel(2, name, 1)
    mixed = run(2, name, 1, states=True, gradients=gradients, weights=True, whole_blocks=1)
    assert_equal(mixed, parallel)
    of_blocks = [v for v in mixed.assembly.params.values() if len(v.shape) == 2 or v.shard]
    assert {v.block for v in of_blocks if v.shard is None} == {0} and {v.block for v in of_blocks if v.shard} >= {1, -1}
    programs = mixed.assembly.programs
    of_first = {name: [op for op in p.ops if op.lane == "comm" and _gathers(op, 0)] for name, p in programs.items()}
    assert {name for name, ops in of_first.items() if ops} == {"micro_only", "gather"}, "what an update has left"


def _gathers(op: Op, block: int) -> bool:
    return op.kind in ("all_gather", "broadcast") and any(v.block == block for v in op.outs)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "normuon"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_gradients_of_one_micro_step_give_the_bits_of_data_parallelism(
    ranks: int, name: str, weights: bool
) -> None:
    divided = run(ranks, name, 1, states=True, gradients=True, weights=weights)
    assert_equal(divided, data_parallel(ranks, name, 1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_gradients_are_sums_over_ranks_that_are_added_over_micro_steps(ranks: int, dtype: str) -> None:
    """Data parallelism adds over micro-steps first. With one micro-step a step, it gives what is added here."""
    precision = BF16.precision(PrecisionRequest(model_dtype="fp32", param_grad_dtype=dtype), NoOptions())
    given = {"precision": precision, "ranks": ranks, "config": CONFIG}
    sums = summed(**given, sharding=Sharding(parts=ranks, states=True, gradients=True), micro_steps=3)
    each = [summed(**given, sharding=Sharding(parts=ranks), micro_steps=1, skipped=i) for i in range(3)]
    assert sums.keys() <= each[0].keys() and len(sums) > 4
    for name, total in sums.items():
        first, *others = [one[name] for one in each]
        for i, addend in enumerate(others, 1):
            first = added(first, addend, f"{name}/sum", ranks * i)
        assert torch.equal(total[: len(first)], first), name
        assert not total[len(first) :].any(), "padding"


def added(total: Tensor, addend: Tensor, name: str, step: int) -> Tensor:
    """Return the sum, which bf16 rounds stochastically by the number of the first rank's micro-step."""
    if total.dtype != torch.bfloat16:
        return addend + total
    return accumulate_rounded(addend, total, torch.tensor(step), torch.tensor(1), stream=crc32(name.encode()))
