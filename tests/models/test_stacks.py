"""Stacks of experts in one tensor of a checkpoint: their matrices, and their places in the param."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import stacked_family
import torch
from stacked_family import CONFIG, MODEL, by_expert
from torch import Tensor

from surogate_core.api import HFTensor, ProgramError, WeightMap
from surogate_core.assembly.assemble import record
from surogate_core.assembly.weight_maps import matrices_of
from surogate_models.api import Interleaved, Stacked, Transposed
from surogate_optim_normuon.optimizer import NORMUON, NORMUON_OP, NorMuonOptions

from . import harness
from .harness import OPS, PlannedModel, hf_loss_sum, plan_inputs, relative_error, valid_tokens

SMALL = CONFIG | {"vocab_size": 97}
FAMILY = {**OPS, NORMUON_OP.kind: NORMUON_OP, **{op.kind: op for op in stacked_family.OPS}}
ROWS = [[[*range(3, 15)], [*range(20, 30)]], [[*range(40, 64)]]]
Change = Callable[[WeightMap], WeightMap]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "OPS", FAMILY)
    monkeypatch.setitem(harness.MODELS, "gpt_oss", MODEL)


def planned(change: Change = lambda m: m, **settings: Any) -> PlannedModel:
    model = replace(MODEL, weights=lambda d: [change(m) for m in MODEL.weights(d)])
    return PlannedModel(SMALL, 2, 24, model=model, **settings)


def test_losses_and_gradients_are_those_of_transformers() -> None:
    theirs, ours = stacked_family.random_model(vocab_size=97), planned()
    ours.load(theirs.state_dict())
    documents = [document for row in ROWS for document in row]
    scale = 1 / valid_tokens(documents)
    loss = hf_loss_sum(theirs, documents) * scale
    loss.backward()
    assert ours.micro_step(ROWS, scale) == pytest.approx(loss.item(), rel=1e-5)
    found = ours.gradients
    errors = {name: relative_error(found[name], p.grad) for name, p in theirs.named_parameters()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize(
    "layout", [Stacked(6), Stacked(6, Transposed()), Stacked(6, Interleaved(2)), Stacked(6, Interleaved(3))]
)
def test_a_stack_is_read_and_written_by_its_indices(layout: Stacked) -> None:
    shape = (5, 4, 6) if layout.of == Transposed() else (5, 6, 4)
    stored = torch.randn(shape)
    rows = layout.load(stored)
    assert rows.shape == layout.shape(shape) == (30, 4) and torch.equal(layout.save(rows), stored)
    assert torch.equal(rows[12:24], layout.load(stored[2:4])) and torch.equal(layout.save(rows[12:24]), stored[2:4])
    alone = stored[3] if layout.of is None else layout.of.load(stored[3])
    assert torch.equal(rows[18:24], alone)
    assert HFTensor("x", shape, layout).leading and not HFTensor("x", shape, Transposed()).leading


@pytest.mark.parametrize(
    ("shape", "message"),
    [((5, 6), "must have three dimensions to be a stack"), ((5, 4, 7), r"has matrices of \[7, 4\], and .* 6 rows")],
)
def test_a_tensor_that_is_no_such_stack_is_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Stacked(6, Transposed()).shape(shape)


# ------------------------------------------------------------------------------------------------------------ matrices


def test_the_matrices_of_a_stack_are_those_of_its_experts() -> None:
    by_name = {m.param: m for m in MODEL.weights(plan_inputs(SMALL).dims)}
    (found,) = matrices_of(by_name["layers.1.mlp.gate_up"])
    assert [m.rows for m in found] == 5 * [128]
    assert [m.name for m in found] == [f"model.layers.1.mlp.experts.gate_up_proj.{e}" for e in range(5)]


def trained(change: Change, steps: int = 2) -> dict[str, Tensor]:
    model = planned(change, optimizer=NORMUON, optimizer_options=NorMuonOptions())
    torch.manual_seed(3)
    for param in model.params.values():
        param.normal_(0, 0.1)
    for step in range(1, steps + 1):
        model.micro_step(ROWS, 0.02)
        model.update(step, 1e-2)
    return {name: param.clone() for name, param in model.params.items()}


def test_normuon_orthogonalizes_each_expert_of_a_stack_by_itself() -> None:
    stacks, experts, one = trained(lambda m: m), trained(by_expert), trained(lambda m: replace(m, matrices=1))
    assert all(torch.equal(stacks[name], experts[name]) for name in stacks)
    differing = {name for name in stacks if not torch.equal(stacks[name], one[name])}
    assert {f"layers.{i}.mlp.{which}" for i in (0, 1) for which in ("gate_up", "down")} <= differing


def refused(change: Change, message: str, build: Any = MODEL.build) -> None:
    inputs = plan_inputs(SMALL)
    weights = [change(m) for m in MODEL.weights(inputs.dims)]
    with pytest.raises(ProgramError, match=message):
        record(replace(inputs, model=replace(MODEL, build=build, weights=lambda d: weights)))


def of(param: str, **fields: Any) -> Change:
    return lambda m: replace(m, **fields) if m.param == param else m


GATE_UP, QKV = "layers.0.mlp.gate_up", "layers.0.attn.qkv"


@pytest.mark.parametrize(
    ("param", "matrices", "message"),
    [
        (GATE_UP, 7, rf"{GATE_UP} \[640, 64\] has a weight map with matrices=7, which does not divide its rows"),
        (GATE_UP, 0, "matrices=0, which does not divide"),
        ("layers.0.mlp.norm", 2, r"norm \[64\] has a weight map with matrices=2, which does not"),
        (QKV, 2, rf"{QKV} \[128, 64\] .* matrices=2, which are of 64 rows, and its .* have 64, 32, 32 rows: a matrix"),
    ],
)
def test_a_number_of_matrices_that_cannot_be_is_refused_by_name(param: str, matrices: int, message: str) -> None:
    refused(of(param, matrices=matrices), message)


def test_several_tensors_may_hold_several_matrices_each() -> None:
    planned(of(QKV, matrices=4))
    qkv = next(m for m in MODEL.weights(plan_inputs(SMALL).dims) if m.param == QKV)
    names = [[matrix.name.rpartition("attn.")[2] for matrix in held] for held in matrices_of(replace(qkv, matrices=4))]
    assert names == [["q_proj.weight.0", "q_proj.weight.1"], ["k_proj.weight"], ["v_proj.weight"]]


@pytest.mark.parametrize(("declared", "fits"), [(5, True), (10, False)])
def test_a_param_that_is_declared_as_other_matrices_than_its_map_is_refused(declared: int, fits: bool) -> None:
    def build(b: Any, d: Any, batch: Any) -> Any:
        param = b.param

        def declaring(name: str, *args: Any, **given: Any) -> Any:
            return param(name, *args, **given, **({"matrices": declared} if name == GATE_UP else {}))

        b.param = declaring
        return MODEL.build(b, d, batch)

    if fits:
        record(replace(plan_inputs(SMALL), model=replace(MODEL, build=build)))
    else:
        refused(lambda m: m, rf"{GATE_UP} .* matrices=10, .* tensors have 640 rows, which are 5 matrices by", build)


def test_two_maps_of_a_parameter_and_one_of_a_vector_are_refused() -> None:
    refused(
        of("layers.0.mlp.down", parameter="model.layers.0.mlp.experts.gate_up_proj"), "mapped twice: .*gate_up_proj"
    )
    refused(of("layers.0.mlp.norm", parameter="x"), r"norm \[64\] is parameter='x', which matrices can be")
