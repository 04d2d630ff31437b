"""Matrices that one rank updates as a whole: which rank, what it holds and runs, and what programs may do with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from models.harness import OPS, plan_inputs, tiny_config
from sharding.ranks import assert_equal, team_of, trained
from sharding.test_equal import EVERY, optimizer

from surogate_core.api import ParamInfo, UpdateContext
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.assembly.parts import assigned
from surogate_core.errors import ProgramError
from surogate_core.machine.devices import device
from surogate_core.memory.alignment import align
from surogate_core.memory.cost import OpCosts, program_cost
from surogate_core.memory.plan import lay_out
from surogate_core.program.builder import Builder
from surogate_core.program.op import Program
from surogate_core.program.shards import Sharding, part_inside, part_of
from surogate_core.program.value import Init, Shard, Value
from surogate_core.program.verify import verify
from surogate_core.runtime.pieces import pieces_of
from surogate_optim_adamw.adamw import ADAMW
from surogate_optim_normuon.optimizer import NORMUON

CONFIG = tiny_config(num_hidden_layers=3)


def assembled(ranks: int, config: Mapping[str, Any] = CONFIG, **given: Any) -> Assembly:
    sharding = Sharding(parts=ranks, states=ranks > 1)
    given = {**optimizer("normuon"), "ops": EVERY, "world_size": ranks, "sharding": sharding, **given}
    return assemble(plan_inputs(config, **given))


def matrix(name: str, shape: tuple[int, ...] = (8, 16), owner: int | None = None, ranks: int = 3) -> Value:
    return Value(name, shape, "fp32", "state", shard=None if owner is None else Shard(shape, ranks, owner))


# --------------------------------------------------------------------------------------------------- who owns what


def params(**sizes: int) -> list[ParamInfo]:
    return [
        ParamInfo(param=Value(name, (size,), "fp32", "param"), of_model=True, kind="matrix", matrices=())
        for name, size in sizes.items()
    ]


def loads(infos: list[ParamInfo], owners: Mapping[Value, int], ranks: int) -> list[int]:
    return [sum(info.param.size**3 for info in infos if owners[info.param] == rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("layers", [28, 36])
def test_ranks_have_work_that_differs_by_less_than_the_largest_param(ranks: int, layers: int) -> None:
    infos = params(**{f"{kind}{i}": size for i in range(layers) for kind, size in (("qkv", 5), ("o", 4), ("up", 7))})
    owners = assigned(infos, lambda info: info.param.size**3, ranks)
    assert owners.keys() == {info.param for info in infos}
    found = loads(infos, owners, ranks)
    assert max(found) - min(found) <= 7**3
    assert max(found) < 1.1 * sum(found) / ranks


def test_the_param_with_most_work_is_first_and_goes_to_the_rank_with_the_least() -> None:
    infos = params(a=1, b=3, c=2, d=3)
    owners = assigned(infos, lambda info: info.param.size**3, 2)
    assert {param.name: rank for param, rank in owners.items()} == {"b": 0, "d": 1, "c": 0, "a": 1}
    assert [param.name for param in owners] == ["b", "d", "c", "a"]


def test_no_rank_sums_all_gradients_of_a_block_while_others_wait() -> None:
    infos = [
        replace(info, param=replace(info.param, name=f"{block}.{info.param.name}", block=block))
        for block in range(32)
        for info in params(qkv=5, o=4, up=7, down=6)
    ]
    owners = assigned(infos, lambda info: info.param.size**3, 8)
    of_block = {block: [owners[info.param] for info in infos if info.param.block == block] for block in range(32)}
    assert min(len({*ranks}) for ranks in of_block.values()) >= 3
    assert len({*loads(infos, owners, 8)}) == 1


def test_without_work_to_compare_ranks_have_as_many_elements() -> None:
    infos = params(a=4, b=1, c=2, d=1)
    owners = assigned(infos, lambda info: 0, 2)
    assert {param.name: rank for param, rank in owners.items()} == {"a": 0, "c": 1, "b": 1, "d": 1}


def test_the_matrices_of_a_model_have_owners_and_all_other_params_have_none() -> None:
    assembly = assembled(3)
    owners = {v.name: v.owner for v in assembly.declared if v.role == "state" and v.owner is not None}
    momenta = {name: owner for name, owner in owners.items() if name.startswith("normuon.momentum.")}
    assert len(momenta) == 4 * 3 and {*momenta.values()} == {0, 1, 2}
    assert owners == momenta | {name.replace(".momentum.", ".v."): owner for name, owner in momenta.items()}


@pytest.mark.parametrize("together", [100, 512, -1, 3])
def test_a_granularity_that_no_part_can_have_is_refused(together: int) -> None:
    wrong = replace(NORMUON, granularity=lambda p: together)
    with pytest.raises(
        ProgramError, match=rf"has the granularity {together}, expected 1 or another .* \(all elements\)"
    ):
        assembled(2, optimizer=wrong)


def test_a_param_with_the_granularity_0_is_updated_by_every_rank() -> None:
    whole = assembled(2, optimizer=replace(NORMUON, granularity=lambda p: 0))
    assert not any(v.shard for v in whole.declared)


# --------------------------------------------------------------------------------------------- memory, time, what runs


def test_values_of_different_owners_share_memory_and_no_others_do() -> None:
    values = [
        matrix("all"),
        matrix("a", (8, 16), 0),
        matrix("b", (4, 5), 1),
        matrix("c", (2, 2), 0),
        matrix("d", (9,), 2),
    ]
    segment = lay_out(values)
    assert segment.nbytes == align(values[0].nbytes) + align(values[1].nbytes) + align(values[3].nbytes)
    for rank in range(3):
        own = [v for v in values if v.owner in (None, rank)]
        ends = [(segment.offsets[v], segment.offsets[v] + v.nbytes) for v in own]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(ends)))


def test_the_states_of_a_rank_are_a_part_and_those_of_all_ranks_are_all() -> None:
    whole, divided = assembled(1), assembled(4)
    sizes = [assembly.memory.segments["state"].nbytes for assembly in (whole, divided)]
    owned = [v for v in divided.declared if v.owner is not None]
    most = max(sum(align(v.nbytes) for v in owned if v.owner == rank) for rank in range(4))
    assert sizes[1] < sizes[0] / 4 + most
    states = {v.name: v.shape for v in whole.declared if v.role == "state" and v.name.startswith("normuon.momentum")}
    assert {v.name: v.shape for v in owned} | states == {v.name: v.shape for v in owned}


def test_every_rank_runs_its_own_ops_and_the_common_ones() -> None:
    assembly = assembled(3)
    update = assembly.only("update")
    owners = [op.owner for op in update.ops]
    assert {0, 1, 2, None} == {*owners}
    assert all(op.owner is None for op in update.ops if op.lane == "comm")
    with team_of(assembly, 3, ops=EVERY) as team:
        ran: dict[int, list[int]] = {}
        for rank, worker in enumerate(team._workers):
            own = ran.setdefault(rank, [])
            program = replace(update, ops=tuple(op for op in update.ops if op.lane != "comm"))
            calls = worker.executor._calls["update"]  # type: ignore[attr-defined]
            kept = [call for call, op in zip(calls, update.ops, strict=True) if op.lane != "comm"]
            worker.executor._calls["update"] = kept  # type: ignore[attr-defined]
            worker.executor.walk("update", own.append)
            assert own == [i for i, op in enumerate(program.ops) if op.owner in (None, rank)]


def test_an_update_takes_the_time_of_the_rank_with_the_most_work() -> None:
    h100 = device("h100")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    costs = [
        program_cost(whole.only("update"), OpCosts(EVERY, h100, whole.kernels.kernel))
        for whole in (assembled(ranks, tiny_config(**sizes)) for ranks in (1, 4))
    ]
    assert costs[0].flops / 4 < costs[1].flops < costs[0].flops / 3.5
    assert costs[1].seconds < costs[0].seconds / 2


# --------------------------------------------------------------------------------------------------------- the results


@pytest.mark.parametrize("weights", [False, True])
def test_ranks_that_own_nothing_train_the_same_bits(weights: bool) -> None:
    """A block has four matrices, of which the smallest is not divided among five ranks."""
    config = tiny_config(num_hidden_layers=1, hidden_size=16, intermediate_size=80)
    given = {"micro_steps": 1, "steps": 2, "ops": EVERY, "weight_decay": 0.1, "max_grad_norm": 1.0}
    given |= optimizer("normuon")
    parallel = trained(config, 5, Sharding(parts=5), **given)
    divided = trained(config, 5, Sharding(parts=5, states=True, gradients=weights, weights=weights), **given)
    assert {v.owner for v in divided.assembly.declared} < {None, 0, 1, 2, 3, 4}
    assert_equal(divided, parallel)


def in_two_ops(context: UpdateContext) -> None:
    """AdamW of copies of the gradients, with a state that has another shape than its param."""
    b, found = context.builder, []
    for p in context.params:
        held = b.state(f"two.{p.name}", (), "fp32", Init(kind="ones"))
        b.emit("commit", context.clip_coef, b.apply("copy", context.clip_coef), held, outs=[held])
        found.append(replace(p, grad=b.apply("copy", p.grad)))
    ADAMW.update(replace(context, params=found))


@pytest.mark.parametrize("gradients", [False, True])
def test_an_optimizer_of_several_ops_may_have_states_of_any_shape(gradients: bool) -> None:
    whole = replace(ADAMW, update=in_two_ops, granularity=lambda p: p.param.size)
    given = {"micro_steps": 1, "steps": 2, "ops": EVERY, "max_grad_norm": 1.0, "optimizer": whole}
    parallel = trained(CONFIG, 3, Sharding(parts=3), **given)
    divided = trained(CONFIG, 3, Sharding(parts=3, states=True, gradients=gradients), **given)
    assert {v.owner for v in divided.assembly.declared if v.name.startswith("two.")} == {None, 0, 1, 2}
    assert_equal(divided, parallel)


def test_the_elements_of_an_owner_are_pieces_of_its_process_alone() -> None:
    value, contents = matrix("x", (3, 4), owner=2, ranks=4), torch.arange(12.0).view(3, 4)
    of_rank = {rank: contents if rank == 2 else torch.full((3, 4), torch.nan) for rank in range(4)}
    for ranks in (range(2), range(2, 4), range(4), range(3, 4)):
        held = pieces_of(value, of_rank.__getitem__, ranks)
        assert held.shape == (3, 4) and held.complete == (2 in ranks)
        assert held.count == (12 if 2 in ranks else 0)
        if held.complete:
            assert torch.equal(held.tensor(), contents)
    assert [value.first(rank) for rank in range(4)] == [0, 0, 0, 12]


# ------------------------------------------------------------------------------------------------------------- programs


def recorded(kind: str, ins: list[Value], outs: list[Value], lane: Any = "compute", **attrs: Any) -> Program:
    b = Builder(OPS, "fp32")
    with b.record("update"):
        b.emit(kind, *ins, outs=outs, lane=lane, **attrs)
        return b.program("update", stage="update")


def test_programs_use_what_a_rank_owns_where_it_is() -> None:
    common, (a, other_a), b = matrix("w"), (matrix(n, owner=0) for n in ("a", "a2")), matrix("b", owner=1)
    world = {"world_size": 3}
    sent = {"lane": "comm", **world, "shapes": (common.shape,)}
    for program in (
        recorded("copy", [a], [other_a]),
        recorded("copy", [common], [a]),
        recorded("broadcast", [a], [common], **sent),
        recorded("reduce", [common, matrix("w2")], [a, b], "comm", **world),
        recorded("wait", [a, b], []),
    ):
        verify(program, OPS)
    for program, what in (
        (recorded("copy", [a], [common]), r"only rank 0 has a:fp32\[8,16\], but not w:fp32"),
        (recorded("copy", [a], [b]), r"only rank 0 has a:fp32\[8,16\], but not b:fp32"),
        (recorded("all_reduce", [a], [a], "comm", **world), r"exchanges a:fp32\[8,16\], which only rank 0 has"),
        (recorded("reduce", [common], [matrix("w2")], "comm", **world), r"w2:fp32\[8,16\] has no owner"),
        (recorded("broadcast", [common], [matrix("w2")], **sent), r"w:fp32\[8,16\] has no owner"),
    ):
        with pytest.raises(ProgramError, match=what):
            verify(program, OPS)


def test_a_broadcast_puts_values_together_in_order() -> None:
    halves = [matrix(f"half{i}", (4, 16), owner=i) for i in range(2)]
    (wide,) = Builder(OPS, "fp32").emit("broadcast", *halves, lane="comm", world_size=3, shapes=((8, 16),))
    assert wide.shape == (8, 16)
    for shapes in (((8, 15),), ((2, 16), (6, 16)), ()):
        with pytest.raises(ProgramError, match="broadcast of"):
            Builder(OPS, "fp32").emit("broadcast", *halves, lane="comm", world_size=3, shapes=shapes)


def test_the_part_of_an_owner_has_the_shape_of_the_whole() -> None:
    whole = replace(matrix("w"), init=Init(), room=4096)
    part, inside = part_of(whole, 3, 1), part_inside(whole, 3, 1)
    assert (part.name, part.shape, part.owner, part.room, part.init) == ("w", whole.shape, 1, 0, None)
    assert (inside.name, inside.inside, inside.owner) == ("w/part of 1", whole, 1)
    assert part.whole_size == whole.size
