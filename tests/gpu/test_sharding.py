"""Ranks that divide states, gradients and weights on GPUs train the bits of ranks that hold all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import losses, make_workplace, write_model
from safetensors.torch import load_file
from sharding.ranks import wholes

from surogate_core.api import Comm, World
from surogate_core.assembly.assemble import assemble
from surogate_core.program.shards import Sharding
from surogate_core.runtime import nccl
from surogate_core.runtime.comms import copies
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker

from .harness import SMALL, Setup, step

pytestmark = pytest.mark.gpu

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"model_dtype": "fp32"},
    "mixed": {"model_dtype": "bf16", "master_dtype": "fp32"},
    "bf16": {"model_dtype": "bf16", "param_grad_dtype": "bf16"},
    "8-bit": {"model_dtype": "bf16", "param_grad_dtype": "bf16", "optimizer": "adamw_8bit"},
    "normuon": {"model_dtype": "bf16", "optimizer": "normuon"},
    "fp8": {"recipe": "fp8-hybrid", "options": {"fp8_amax_history": 4}, "param_grad_dtype": "bf16"},
    "nvfp4": {"recipe": "nvfp4", "options": {"skip_quant_first_layers": 0, "skip_quant_last_layers": 0}},
    "offloaded": {"model_dtype": "bf16", "master_dtype": "fp32", "offload": ("optimizer", "master")},
}
LEVELS = {
    "states": {"states": True},
    "weights": {"states": True, "weights": True},
    "gradients": {"states": True, "gradients": True},
    "all": {"states": True, "gradients": True, "weights": True},
}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs, fewer are visible")


@contextmanager
def by_copies(ranks: int) -> Iterator[Sequence[Comm]]:
    """Connect ranks of one GPU."""
    yield copies.connect([0] * ranks)


@contextmanager
def by_nccl(ranks: int) -> Iterator[Sequence[Comm]]:
    """Connect a rank on each GPU."""
    library = nccl.load()
    world = World(size=ranks, ranks=range(ranks), devices=range(ranks))
    comms = nccl.connect(world, library, nccl.new_identity(library))
    try:
        yield comms
    finally:
        nccl.disconnect(comms)


CONNECTED = {"copies": by_copies, "nccl": by_nccl}


@dataclass(frozen=True)
class Trained:
    """What some steps gave: losses and norms, and the weights of every rank."""

    readings: list[tuple[float, ...]]
    weights: list[dict[str, torch.Tensor]]


def trained(
    connect: Any, ranks: int, sharding: Sharding, micro_steps: int, *, graphs: bool = True, **settings: Any
) -> Trained:
    setup = Setup(SMALL | {"num_hidden_layers": 2}, **settings)
    setup.given = replace(setup.given, world_size=ranks, grad_accum_steps=micro_steps, sharding=sharding)
    setup.assembly = assemble(setup.given)

    def make(comm: Comm) -> Worker:
        return Worker.on_gpu(setup.assembly, replace(setup.context(), comm=comm), 1, poison=True)

    with connect(ranks) as comms:
        team = Team(comms, make)
        try:
            initialize((v for v in setup.assembly.allocated if v.init and not v.shard), team.buffers.persistent, 7)
            for part in setup.assembly.staging:
                views = team.staged(part)
                named = [replace(place, name=param.name) for param, place in part.places.items()]
                initialize(named, lambda v, views=views: views[v.name], 7)
                team.derive(part)
            team.start(graphs=graphs)
            readings: list[tuple[float, ...]] = [
                step(setup, team, number, ranks * micro_steps) for number in range(1, 5)
            ]
            readings.append(team.evaluate(*(setup.batch(seed) for seed in range(ranks))))
            team.gather()
            team.settle()
            weights = wholes(team, setup.assembly)
        finally:
            team.close()
    return Trained(readings, weights)


def assert_equal(found: Trained, expected: Trained) -> None:
    assert found.readings == expected.readings
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        assert ours.keys() == theirs.keys()
        assert not [name for name, x in ours.items() if not torch.equal(x, theirs[name])]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("by", "ranks"), [("copies", 2), ("copies", 3), pytest.param("nccl", 2, marks=two_gpus)], ids=str
)
def test_every_level_gives_the_bits_of_data_parallelism(by: str, ranks: int, precision: str) -> None:
    """Gradients are divided with one micro-step only: with more, they are added in another order."""
    for micro_steps, names in ((1, LEVELS), (2, ("states", "weights"))):
        parallel = trained(CONNECTED[by], ranks, Sharding(parts=ranks), micro_steps, **PRECISIONS[precision])
        for name in names:
            sharding = Sharding(parts=ranks, **LEVELS[name])
            found = trained(CONNECTED[by], ranks, sharding, micro_steps, **PRECISIONS[precision])
            assert_equal(found, parallel)


@two_gpus
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_captured_and_eager_steps_are_bit_identical(precision: str) -> None:
    sharding = Sharding(parts=2, **LEVELS["all"])
    replayed, eager = (
        trained(by_nccl, 2, sharding, 2, graphs=graphs, **PRECISIONS[precision]) for graphs in (True, False)
    )
    assert_equal(replayed, eager)


RUNS: dict[str, dict[str, Any]] = {
    "full": {"model_dtype": "bf16"},
    "lora": {"model_dtype": "bf16", "lora": True, "from_scratch": False},
    "qlora": {"model_dtype": "bf16", "lora": True, "qlora_bnb": True, "from_scratch": False},
}


@pytest.mark.parametrize("ranks", [{"ranks_per_gpu": 2}, pytest.param({"gpus": 2}, marks=two_gpus)], ids=str)
@pytest.mark.parametrize("run", RUNS)
def test_runs_of_levels_1_and_3_write_equal_models(tmp_path: Path, run: str, ranks: dict[str, int]) -> None:
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    place = make_workplace(tmp_path, max_steps=6, deterministic="true", **rows, **RUNS[run])
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    if not RUNS[run].get("from_scratch", True):
        changes = {"lora": None, "qlora_bnb": None, "from_scratch": True}
        base = place.write(output_dir=str(tmp_path / "base"), max_steps=2, warmup_steps=0, **changes)
        done = place.surogate("train", base)
        assert done.returncode == 0, done.stdout + done.stderr
        place = replace(place, config={**place.config, "model": str(tmp_path / "base")})
    for level in (1, 3):
        config = place.write(output_dir=str(tmp_path / str(level)), zero_level=level, **ranks)
        done = place.surogate("train", config)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "3") == losses(tmp_path / "1")
    name = "model.safetensors" if run == "full" else "adapter/adapter_model.safetensors"
    one, three = (load_file(tmp_path / level / name) for level in ("1", "3"))
    assert one.keys() == three.keys() and not [key for key, x in one.items() if not x.equal(three[key])]
