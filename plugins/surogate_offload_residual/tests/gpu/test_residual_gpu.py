"""The residual stream in pinned host memory on the GPU: same bits, eagerly and in CUDA graphs, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.harness import SMALL, Setup

from surogate_core.assembly.recomputed import PARTS
from surogate_core.testing.kernels import same_bits

pytestmark = pytest.mark.gpu

DEEP = SMALL | {"num_hidden_layers": 8}


@pytest.mark.parametrize("recompute", [frozenset(), frozenset(PARTS)], ids=["none", "all"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-hybrid"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_steps_are_bit_identical(recipe: str, recompute: frozenset[str], graphs: bool) -> None:
    settings: dict[str, Any] = {"recipe": recipe, "recompute": recompute, "deterministic": "true"}
    plain, moved = Setup(DEEP, **settings), Setup(DEEP, **settings, offload=("residual",))
    assert moved.assembly.memory.host is not None and plain.assembly.memory.host is None
    assert moved.assembly.memory.arena_bytes < plain.assembly.memory.arena_bytes
    workers = [setup.gpu(graphs=graphs) for setup in (plain, moved)]
    for step in (1, 2, 3):
        both = [s.step(w, step, step=step) for s, w in zip((plain, moved), workers, strict=True)]
        assert both[0] == both[1], step
    weights = [setup.weights(worker) for setup, worker in zip((plain, moved), workers, strict=True)]
    assert all(same_bits(value, weights[1][name]) for name, value in weights[0].items())
    for worker in workers:
        worker.close()


def test_values_on_the_host_are_pinned() -> None:
    setup = Setup(DEEP, recompute=frozenset(PARTS), offload=("residual",))
    worker = setup.gpu()
    program = setup.assembly.programs["micro_first"]
    host = next(op.outs[0] for op in program.ops if op.lane == "to_host")
    view = worker.buffers.view(host, program.name)
    assert view.device.type == "cpu" and view.is_pinned()
    setup.step(worker, 1)
    assert bool(view.isfinite().all()) and bool(view.any())
    worker.close()
