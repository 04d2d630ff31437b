"""The gradients of a block by one op: the bits of the products that it replaces, and where it replaces them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.harness import OPS, PlannedModel, random_documents, random_hf_model, tiny_config
from torch import Tensor

from surogate_core.api import AdapterDef, Builder, Op, PrecisionRequest, ProgramError, Target, Value
from surogate_core.testing.binding import choose
from surogate_core.testing.devices import device
from surogate_core.testing.ops import check_op
from surogate_lora import gradients as gradients_module
from surogate_lora.adapter import LORA
from surogate_lora.gradient_kernel import LORA_WGRAD_KERNEL
from surogate_lora.gradients import refusal, strips
from surogate_lora.ops import OPS as LORA_OPS
from surogate_lora.ops import Place
from surogate_lora.options import LoraOptions

BF16 = PrecisionRequest(model_dtype="bf16")
LORA_WGRAD = next(definition for definition in LORA_OPS if definition.kind == "lora_wgrad")
UNFUSED = replace(LORA, fuse=lambda program, options: program)


def planned(adapter: AdapterDef = LORA, rank: int = 8, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    settings = {"request": BF16} | settings
    adapters = [(adapter, LoraOptions(lora_rank=rank, **(options or {})))]
    return PlannedModel(tiny_config(), 3, 24, lmhead_chunks=3, adapters=adapters, **settings)


def kinds(model: PlannedModel, program: str = "micro_next") -> Counter[str]:
    return Counter(op.kind for op in model.assembly.programs[program].ops if op.block == 1)


def gradients(model: PlannedModel, seed: int) -> dict[str, Tensor]:
    """Those of two micro-steps on fixed weights, A and B drawn."""
    model.load(random_hf_model(tiny_config()).state_dict())
    for i, value in enumerate(model.assembly.trainable):
        model.params[value.name].normal_(0, 0.1, generator=torch.Generator().manual_seed(seed + i))
    rows = [[document] for document in random_documents([24, 24, 24], tiny_config()["vocab_size"])]
    for first in (True, False):
        model.micro_step(rows, 1e-2, first=first)
    grads = [v for v in model.assembly.declared if v.role == "grad"]
    return {v.name: model.buffers.persistent(v).clone() for v in grads}


# ------------------------------------------------------------------------------------------------------------- program


def test_a_block_has_one_op_for_all_gradients_of_adapters() -> None:
    fused, apart = kinds(planned()), kinds(planned(UNFUSED))
    assert (apart["lora_wgrad"], apart["lora_unpack"], apart["linear_wgrad"]) == (0, 1, 8)
    assert (fused["lora_wgrad"], fused["lora_unpack"], fused["linear_wgrad"]) == (1, 0, 0)
    assert kinds(planned(), "evaluate") == kinds(planned(UNFUSED), "evaluate")


@pytest.mark.parametrize(
    "settings", [{}, {"recompute": frozenset({"block"})}, {"request": replace(BF16, param_grad_dtype="bf16")}]
)
def test_gradients_have_the_bits_of_the_products_and_their_unpacking(settings: dict[str, Any]) -> None:
    fused, apart = gradients(planned(**settings), 1), gradients(planned(UNFUSED, **settings), 1)
    assert fused.keys() == apart.keys()
    assert all(torch.equal(fused[name], apart[name]) for name in apart)


@pytest.mark.parametrize("settings", [{}, {"recompute": frozenset({"block"})}], ids=["kept", "recomputed"])
def test_in_long_rows_operands_do_not_wait_for_attention(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP and the projection of the output have one op before the backward pass of attention, qkv one after it."""
    whole = gradients(planned(**settings), 1)
    monkeypatch.setattr(gradients_module, "MANY_ROWS", 71)
    model = planned(**settings)
    order = [op for op in model.assembly.programs["micro_next"].ops if op.block == 1 and op.phase == "backward"]
    kinds = [op.kind for op in order if op.kind in ("lora_wgrad", "attention_bwd")]
    assert kinds == ["lora_wgrad", "attention_bwd", "lora_wgrad"]
    divided = gradients(model, 1)
    assert divided.keys() == whole.keys()
    assert all(torch.equal(divided[name], whole[name]) for name in whole)


def test_in_long_rows_each_product_of_dropped_inputs_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the A of each of seven projections, and for the B of each of four stored matrices, with the same bits."""
    options: dict[str, Any] = {"options": {"lora_dropout": 0.1}}
    apart = gradients(planned(**options), 1)
    monkeypatch.setattr(gradients_module, "MANY_ROWS", 71)
    model = planned(**options)
    found = kinds(model)
    assert (found["lora_wgrad"], found["lora_unpack"], found["linear_wgrad"]) == (11, 0, 0)
    assert (found["lora_join"], found["lora_split"]) == (2, 2)
    fused = gradients(model, 1)
    assert fused.keys() == apart.keys() and all(torch.equal(fused[name], apart[name]) for name in apart)


def test_rows_that_are_not_many_have_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "MANY_ROWS", 72)
    assert kinds(planned())["lora_wgrad"] == 1


@pytest.mark.parametrize(
    "case",
    [
        {"request": PrecisionRequest(model_dtype="fp32")},
        {"rank": 4},
        {"rank": 72},
        {"options": {"lora_dropout": 0.1}},
    ],
    ids=["fp32 operands", "ranks that are no octets", "more ranks than one read computes", "dropout"],
)
def test_products_that_the_kernel_does_not_compute_stay(case: dict[str, Any]) -> None:
    assert kinds(planned(**case))["lora_wgrad"] == 0
    assert kinds(planned(**case))["linear_wgrad"] > 0


def test_products_stay_where_something_else_reads_one() -> None:
    """A gradient that another op reads too must exist."""
    program = planned(UNFUSED).assembly.programs["micro_next"]
    unpack = next(op for op in program.ops if op.kind == "lora_unpack")
    other = Op("cast", unpack.ins[:1], (Value(name="copy", shape=unpack.ins[0].shape, dtype="bf16", role="act"),))
    fused = LORA.fuse(replace(program, ops=(*program.ops, other)), LoraOptions(lora_rank=8))
    assert unpack in fused.ops
    assert Counter(op.kind for op in fused.ops)["lora_wgrad"] == len({op.block for op in program.ops}) - 2


# ------------------------------------------------------------------------------------------------------------------ op

SHAPES = ((32, 8), (16, 8), (8, 24), (8, 24))
PLACES = (Place(0, 0, 0, 2.0), Place(0, 32, 8, 0.5), Place(1, 0, 0, 1.0), Place(1, 8, 0, 1.0))


def op(dtype: str = "bf16", **attrs: Any) -> Op:
    """Two branches of a product: dy [5, 48] and x A^T [5, 16], dy B [5, 16] and x [5, 24]."""
    b = Builder(OPS, "fp32")
    with b.record("backward") as ops:
        ins = [b.activation("in", (5, columns), dtype) for columns in (48, 16, 16, 24)]
        given = {"shapes": SHAPES, "places": PLACES, "dtypes": ("fp32",) * 4} | attrs
        b.emit("lora_wgrad", *ins, **given)
    return ops[0]


def test_parts_are_products_of_columns() -> None:
    ins = [torch.randn(5, columns, dtype=torch.float64) for columns in (48, 16, 16, 24)]
    dy, inner, d_inner, x = ins
    found = check_op(LORA_WGRAD, *ins, shapes=SHAPES, places=PLACES, dtypes=("fp64",) * 4)
    expected = [
        2.0 * dy[:, :32].T @ inner[:, :8],
        0.5 * dy[:, 32:].T @ inner[:, 8:],
        d_inner[:, :8].T @ x,
        d_inner[:, 8:].T @ x,
    ]
    for out, wanted in zip(found, expected, strict=True):
        assert torch.allclose(out, wanted, rtol=1e-12)


def test_a_wide_operand_is_read_once_for_all_ranks() -> None:
    """Each B reads its columns of dy; both A read x."""
    block = op()
    dy, _, _, x = block.ins
    found = [(s.wide, s.column, s.columns, s.ranks, [p.out for p in s.parts]) for s in strips(block)]
    assert found == [(dy, 0, 32, 8, [0]), (dy, 32, 16, 8, [1]), (x, 0, 24, 16, [2, 3])]


def test_flops_are_those_of_the_parts() -> None:
    assert LORA_WGRAD.flops(op()) == 2 * 5 * (32 * 8 + 16 * 8 + 2 * 8 * 24)


def test_operands_that_do_not_fit_are_refused() -> None:
    b = Builder(OPS, "fp32")
    with b.record("backward"):
        dy, x = b.activation("dy", (5, 16), "bf16"), b.activation("x", (6, 8), "bf16")
        with pytest.raises(ProgramError, match="same number of rows"):
            b.emit("lora_wgrad", dy, x, shapes=((16, 8),), places=(Place(0, 0, 0, 1.0),), dtypes=("fp32",))
    with pytest.raises(ProgramError, match="leaves"):
        op(places=(*PLACES[:3], Place(1, 16, 0, 1.0)))


# -------------------------------------------------------------------------------------------------------------- kernel


def test_the_kernel_serves_what_the_pass_makes() -> None:
    target = Target(device("a100"))
    assert refusal(op()) == ""
    for accumulate in (frozenset[int](), frozenset({0, 3})):
        assert choose([LORA_WGRAD_KERNEL], replace(op(), accumulate=accumulate), target) is LORA_WGRAD_KERNEL
    with pytest.raises(AssertionError, match="SM80"):
        choose([LORA_WGRAD_KERNEL], op(), Target(replace(device("a100"), sm=75)))
    with pytest.raises(AssertionError, match="operands must be bf16"):
        choose([LORA_WGRAD_KERNEL], op("fp32"), target)
    narrow = replace(op(dtypes=("bf16",) * 4), accumulate=frozenset({1}))
    with pytest.raises(AssertionError, match="accumulates only into fp32"):
        choose([LORA_WGRAD_KERNEL], narrow, target)


def test_the_workspace_holds_a_partial_sum_of_every_unit_and_tile() -> None:
    """Three tiles of one step each: three units, which make at most five sums of 256 x 16 in fp32."""
    assert LORA_WGRAD_KERNEL.workspace(op(), Target(device("a100"))) == (3 + 3 - 1) * 256 * 16 * 4
