"""Optimizer steps of several CPU ranks, as threads, with and without divided states, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from models.harness import OPS, plan_inputs
from random_batches import random_batch
from torch import Tensor

from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.program.shards import Sharding
from surogate_core.program.value import Value
from surogate_core.runtime.comms import copies
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker


@dataclass(frozen=True)
class Trained:
    """What some steps gave: losses and norms of each, the weights of every rank, the states, and the programs."""

    readings: list[tuple[float, float]]
    weights: list[dict[str, Tensor]]
    states: dict[str, Tensor]
    assembly: Assembly


@contextmanager
def team_of(assembly: Assembly, ranks: int, seed: int = 1, ops: Mapping[str, Any] = OPS) -> Iterator[Team]:
    comms = copies.connect([0] * ranks, 60.0)

    def make(comm: Any) -> Worker:
        torch.set_num_threads(1)
        return Worker.on_cpu(assembly, ops, seed, comm, poison=True)

    team = Team(comms, make)
    try:
        yield team
    finally:
        team.close()


def trained(
    config: Mapping[str, Any],
    ranks: int,
    sharding: Sharding,
    *,
    steps: int = 3,
    micro_steps: int = 2,
    seed: int = 0,
    ops: Mapping[str, Any] = OPS,
    **given: Any,
) -> Trained:
    """Train on random batches, which depend on `seed` alone. `given` are fields of PlanInputs."""
    sizes = {"batch_size": 2, "seq_len": 32, "max_documents": 64, "grad_accum_steps": micro_steps}
    inputs = plan_inputs(config, **sizes, ops=ops, world_size=ranks, sharding=sharding, **given)
    assembly = assemble(inputs)
    rng = np.random.default_rng(seed)
    with team_of(assembly, ranks, ops=ops) as team:
        initialize((v for v in assembly.allocated if v.init and not v.shard), team.buffers.persistent, 3)
        for part in assembly.staging:
            views = team.staged(part)
            staged = [replace(place, name=param.name) for param, place in part.places.items()]
            initialize(staged, lambda v, views=views: views[v.name], 3)  # type: ignore[misc]
            team.derive(part)
        team.start()
        readings = []
        for step in range(1, steps + 1):
            for micro in range(micro_steps):
                batches = [random_batch(rng, config, 2, 32, 64) for _ in range(ranks)]
                index = (micro_steps * step + micro) * ranks
                last = micro == micro_steps - 1
                team.micro_step(*batches, first=micro == 0, last=last, loss_scale=0.01, index=index)
            readings.append(team.update(lr=1e-2, step=step).values())
        evaluated = team.evaluate(*(random_batch(rng, config, 2, 32, 64) for _ in range(ranks)))
        team.gather()
        team.settle()
        weights = wholes(team, assembly)
        lasting = (v for v in assembly.declared if v.role == "state" and not v.derived and not v.collects)
        states = {v.name: whole(team, v) for v in lasting if v not in assembly.pending}
    return Trained([*readings, (*evaluated, 0.0)], weights, states, assembly)


def summed(
    config: Mapping[str, Any],
    ranks: int,
    sharding: Sharding,
    micro_steps: int,
    skipped: int = 0,
    **given: Any,
) -> dict[str, Tensor]:
    """Run the micro-steps of a step, on the batches after those of as many as are `skipped`.

    Return the gradients. Of divided ones, and no others if there are some, the parts of all ranks one after another.
    """
    sizes = {"batch_size": 2, "seq_len": 32, "max_documents": 64, "grad_accum_steps": micro_steps}
    assembly = assemble(plan_inputs(config, **sizes, world_size=ranks, sharding=sharding, **given))
    rng = np.random.default_rng(5)
    with team_of(assembly, ranks) as team:
        initialize((v for v in assembly.allocated if v.init and not v.shard), team.buffers.persistent, 3)
        team.start()
        for _ in range(skipped * ranks):
            random_batch(rng, config, 2, 32, 64)
        for micro in range(micro_steps):
            batches = [random_batch(rng, config, 2, 32, 64) for _ in range(ranks)]
            last = micro == micro_steps - 1
            team.micro_step(*batches, first=micro == 0, last=last, loss_scale=0.01, index=micro * ranks)
        team.settle()
        found = {}
        for value in (v for v in assembly.declared if v.role == "grad"):
            workers = team._workers if value.shard else team._workers[:1]
            parts = [worker.buffers.persistent(value).flatten() for worker in workers]
            if value.shard or not sharding.gradients:
                found[value.name.removesuffix("/part")] = torch.cat(parts)
    return found


def wholes(team: Team, assembly: Assembly) -> list[dict[str, Tensor]]:
    """Return the weights of every rank, those that ranks divide put together."""
    found = []
    for worker in team._workers:
        held = {name: view.cpu().clone() for name, view in worker.params().items()}
        for name, value in assembly.params.items():
            if value.shard:
                held[name] = whole(team, value)
        found.append(held)
    return found


def whole(team: Team, value: Value) -> Tensor:
    """Return a value of which the ranks have all elements together."""
    held = team.pieces(value)
    return torch.cat([part.cpu() for part in held.tensors]).view(held.shape)


def assert_equal(found: Trained, expected: Trained) -> None:
    """Check that two runs gave the same bits on every rank."""
    readings, others = ([[np.asarray(v).tolist() for v in step] for step in run.readings] for run in (found, expected))
    assert readings == others
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        assert ours.keys() == theirs.keys()
        for name, x in ours.items():
            assert torch.equal(x, theirs[name]), name
    assert found.states.keys() == expected.states.keys()
    for name, x in found.states.items():
        assert torch.equal(x, expected.states[name]), name
