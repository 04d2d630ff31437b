"""Ranks that divide bf16 masters and states round them with the random bits of the whole values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.harness import OPS, tiny_config
from sharding.ranks import assert_equal, trained

from surogate_core.api import PrecisionRequest
from surogate_core.program.shards import Sharding
from surogate_offload_states import selection
from surogate_offload_states.plugin import surogate_offload_strategies
from surogate_optim_adamw_8bit.optimizer import ADAMW_8BIT, ADAMW_8BIT_OP, AdamW8bitOptions

EXAMPLE = Path(__file__).parents[2] / "plugins/example_third_party/src"


def settings(name: str) -> dict[str, Any]:
    if name == "adamw":
        return {"request": PrecisionRequest(model_dtype="bf16", optimizer_state_dtype="bf16")}
    given: dict[str, Any] = {"request": PrecisionRequest(model_dtype="bf16")}
    if name == "adamw_8bit":
        ops, optimizer, options = ADAMW_8BIT_OP, ADAMW_8BIT, AdamW8bitOptions()
    else:
        from acme_surogate.sgd import SGD, SGD_OP, SGDOptions

        ops, optimizer, options = SGD_OP, SGD, SGDOptions()
    return given | {"ops": OPS | {ops.kind: ops}, "optimizer": optimizer, "optimizer_options": options}


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "acme_sgd"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_states_in_bf16_have_the_bits_of_data_parallelism(
    ranks: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the states of a third party's optimizer, the example of the documentation."""
    monkeypatch.syspath_prepend(EXAMPLE)
    given = {"steps": 2, "micro_steps": 1, "weight_decay": 0.1, "max_grad_norm": 1.0, **settings(name)}
    config = tiny_config(num_hidden_layers=2)
    parallel = trained(config, ranks, Sharding(parts=ranks), **given)
    divided = trained(config, ranks, Sharding(parts=ranks, states=True), **given)
    held = {v.name.split(".")[0] for v in divided.assembly.declared if v.shard}
    assert held == {name}, "no state is divided"
    assert_equal(divided, parallel)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_masters_on_the_host_are_rounded_with_the_bits_of_the_whole(
    zero_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the update works on copies of them on the device."""
    monkeypatch.setattr(selection, "SMALLEST_BYTES", 0)
    (strategy,) = (s for s in surogate_offload_strategies() if s.name == "master")
    request = PrecisionRequest(model_dtype="fp32", master_dtype="bf16")
    given = {"steps": 2, "micro_steps": 1, "weight_decay": 0.1, "request": request}
    held = {"offload": [(strategy, strategy.options(offload_master=True))], "zero_copy": zero_copy}
    config = tiny_config(num_hidden_layers=2)
    parallel = trained(config, 2, Sharding(parts=2), **given)
    divided = trained(config, 2, Sharding(parts=2, states=True), **given, **held)
    assert any(v.shard and v.place == "host" and v.dtype == "bf16" for v in divided.assembly.declared)
    assert_equal(divided, parallel)
