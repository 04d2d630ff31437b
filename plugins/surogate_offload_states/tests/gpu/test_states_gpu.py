"""Optimizer states, masters and weights in pinned host memory on the GPU: same bits, eagerly and in CUDA graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import settings
from gpu.harness import SMALL, Setup

from surogate_core.assembly.streaming import ZeroCopy
from surogate_core.runtime.comms import copies
from surogate_core.runtime.finite_check import all_finite
from surogate_core.runtime.worker import Worker
from surogate_core.testing.kernels import same_bits

pytestmark = pytest.mark.gpu

DEEP = SMALL | {"num_hidden_layers": 6}
MASTERS = {"model_dtype": "bf16", "master_dtype": "fp32", "optimizer_state_dtype": "bf16", "param_grad_dtype": "bf16"}
BF16 = MASTERS | {"master_dtype": "bf16"}
STRATEGIES = ("grads", "master", "optimizer", "residual", "weights")
PARTS = ("block", "rmsnorm", "swiglu")
MODES = {"chunks": {"attn_bwd_chunks": 2}, "zero copy": {"zero_copy": True}}
NEEDS = {"zero copy": {"grads", "master", "optimizer", "weights"}}
"""One of these strategies must be chosen too."""
ARRAY = settings([*STRATEGIES, *PARTS, *MODES], whole=("block",))


def trained(
    *, graphs: bool = True, config: Any = DEEP, **given: Any
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Return (loss, norm) of three steps, and all params, gradients and states after them."""
    setup = Setup(config, deterministic="true", **given)
    worker = setup.gpu(graphs=graphs)
    readings = [setup.step(worker, step, step=step) for step in (1, 2, 3)]
    worker.settle()
    kept = [v for v in setup.assembly.allocated if v.role in ("param", "grad", "state")]
    found = {v.name: worker.buffers.persistent(v).cpu().clone() for v in kept if "streamed" not in v.name}
    worker.close()
    return readings, found


def assert_same(plain: Any, held: Any) -> None:
    assert plain[0] == held[0]
    assert plain[1].keys() == held[1].keys()
    assert [name for name, value in plain[1].items() if not same_bits(value, held[1][name])] == []


@pytest.fixture(scope="module")
def plain() -> Any:
    return trained(**MASTERS)


@pytest.mark.parametrize("chosen", ARRAY, ids=["-".join(sorted(row)) for row in ARRAY])
def test_every_combination_computes_the_same_bits(chosen: frozenset[str], plain: Any) -> None:
    """A pairwise covering array of strategies and recomputed parts (the seed is `covering.SEED`), and all at once."""
    held: dict[str, Any] = {
        "offload": sorted(chosen.intersection(STRATEGIES)),
        "recompute": chosen.intersection(PARTS),
    }
    for mode in sorted(chosen & MODES.keys()):
        if mode not in NEEDS or NEEDS[mode] & chosen:
            held |= MODES[mode]
    assert_same(plain, trained(**MASTERS, **held))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "normuon"])
@pytest.mark.parametrize("zero_copy", [True, "auto"])
def test_the_update_reads_and_writes_host_memory_without_copies(
    optimizer: str, graphs: bool, zero_copy: ZeroCopy
) -> None:
    dtypes = MASTERS if optimizer != "adamw_8bit" else MASTERS | {"optimizer_state_dtype": "fp32"}
    held = trained(
        optimizer=optimizer, graphs=graphs, **dtypes, offload=("grads", "master", "optimizer"), zero_copy=zero_copy
    )
    assert_same(trained(optimizer=optimizer, **dtypes), held)


def test_ranks_take_weights_on_the_host_from_rank_0() -> None:
    setup = Setup(DEEP, adapter={"lora_rank": 8}, model_dtype="bf16", offload=("weights",))
    contexts = [replace(setup.context(), comm=comm) for comm in copies.connect([0, 0])]
    first, second = (Worker.on_gpu(setup.assembly, context, 1) for context in contexts)
    frozen = [v for v in setup.assembly.allocated if v.place == "host"]
    setup.fill(first)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Worker.share, (first, second)))
    assert frozen
    for value in frozen:
        assert same_bits(second.buffers.persistent(value), first.buffers.persistent(value))
        assert first.buffers.persistent(value).is_pinned()
    assert all_finite(second.params().values())  # on the device and on the host
    first.close()
    second.close()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "normuon"])
def test_weights_that_are_their_own_masters_are_updated_on_the_way_through(optimizer: str, graphs: bool) -> None:
    dtypes = BF16 if optimizer != "adamw_8bit" else BF16 | {"optimizer_state_dtype": "fp32"}
    held = trained(optimizer=optimizer, graphs=graphs, **dtypes, offload=("optimizer", "weights"))
    assert_same(trained(optimizer=optimizer, **dtypes), held)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_rows_of_a_frozen_embedding_are_read_in_host_memory(graphs: bool) -> None:
    given = {"config": DEEP | {"tie_word_embeddings": False}, "adapter": {"lora_rank": 8}, "model_dtype": "bf16"}
    assert_same(trained(**given), trained(**given, graphs=graphs, offload=("embedding",), zero_copy="auto"))


@pytest.mark.parametrize("adapter", [None, {"lora_rank": 8}], ids=["full", "lora"])
def test_quantized_weights_are_held_on_the_host(adapter: Any) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8-hybrid needs SM89")
    given = {"recipe": "fp8-hybrid", "adapter": adapter, "model_dtype": "bf16"}
    assert_same(trained(**given), trained(**given, offload=("quants",)))


def test_a_snapshot_reads_held_values_where_they_are() -> None:
    setup = Setup(DEEP, **BF16, offload=("optimizer",))
    worker = setup.gpu()
    states = [v for v in setup.assembly.declared if v.name.startswith("adamw.")]
    assert {v.place for v in states} == {"device", "host"}
    setup.step(worker, 1)
    copied = worker.allocate_snapshot(states)
    worker.snapshot()
    copied.wait()
    assert all(same_bits(copied.view(v).cpu(), worker.buffers.persistent(v).cpu()) for v in states)
    copied.release()
    setup.step(worker, 2, step=2)
    worker.close()
