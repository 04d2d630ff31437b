"""Mixtures under fp8-hybrid on the CPU: what is quantized, its bits, and training full and with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_model import Model, differing, kinds
from gate_forms import FORMS
from models.harness import tiny_config

from surogate_core.api import Program, Target
from surogate_core.testing.devices import device
from surogate_core.testing.kernels import same_bits
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_models_moe import reference
from surogate_qlora_nf4.format import NF4
from surogate_recipes_fp8.reference import fp8_quantize, fp8_weighted_swiglu, fp8_weighted_swiglu_bwd
from surogate_recipes_nvfp4.recipe import NVFP4

LAYERS, EXPERTS = 2, 5
CONFIG = tiny_config(
    **{"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    **{"hidden_size": 128, "vocab_size": 64, "num_hidden_layers": LAYERS, "head_dim": 16},
)
WEIGHTED = ("fp8_weighted_swiglu", "fp8_weighted_swiglu_bwd")
EXPERTS_OF = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapter(*parameters: str) -> dict[str, Any]:
    return {"adapters": [(LORA, LoraOptions(lora_rank=8, lora_target_parameters=parameters))]}


def test_products_of_experts_are_quantized_forward_and_backward() -> None:
    """Gradients of weights stay in bf16. Fast sums are those of the forward pass."""
    program = Model(CONFIG).assembly.programs["micro_first"]
    found = kinds(program)
    assert found["fp8_grouped_linear"] == 4 * LAYERS and found["grouped_linear_wgrad"] == 2 * LAYERS
    assert not {"grouped_linear", "grouped_linear_dgrad"} & found.keys()
    for op in program.ops:
        if op.kind == "fp8_grouped_linear":
            forward = op.phase == "forward"
            assert op.ins[0].dtype == ("e4m3" if forward else "e5m2")
            assert (op.attrs["fast"], op.attrs["beside"]) == (forward, not forward)
        if op.kind == "grouped_linear_wgrad":
            assert {v.dtype for v in op.ins[:2]} == {"bf16"}


def test_branches_are_added_by_the_products_in_fp8() -> None:
    """Those of both projections, forward and backward. They are of bf16."""
    program = Model(CONFIG, **adapter(*EXPERTS_OF)).assembly.programs["micro_first"]
    products = [op for op in program.ops if op.kind == "fp8_grouped_linear"]
    assert len(products) == 4 * LAYERS
    assert all([v.dtype for v in op.ins[5:]] == ["bf16", "bf16"] for op in products)
    assert not {"add", "grouped_linear_add", "grouped_linear_dgrad_add"} & kinds(program).keys()


def test_a_checkpoint_of_one_device_has_the_states_of_any_other() -> None:
    """Those of experts too where these stay in bf16, in one order, which is that of the columns of the history."""
    targets = [{}, *({"target": Target(device(name))} for name in ("h200", "l40s", "b200"))]
    assemblies = [Model(CONFIG, **target).assembly for target in targets]
    first, *others = (
        [(v.name, v.shape) for v in a.allocated if ".amax" in v.name or "history" in v.name] for a in assemblies
    )
    assert len(first) == 1 + 2 * 4 * LAYERS and all(other == first for other in others)


@pytest.mark.parametrize(
    ("settings", "quantized"),
    [
        ({}, True),
        ({"target": Target(device("h200"))}, True),
        ({"target": Target(device("l40s"))}, False),
        ({"target": Target(device("b200"))}, False),
        ({"recipe": NVFP4, "options": NVFP4.options(), "fp8": False}, False),
    ],
    ids=["CPU", "SM90", "SM89", "SM100", "nvfp4"],
)
def test_experts_stay_in_bf16_where_no_kernel_multiplies_groups(settings: dict[str, Any], quantized: bool) -> None:
    found = kinds(Model(CONFIG, **settings).assembly.programs["evaluate"])
    assert ("grouped_linear" in found) == (not quantized) and ("fp8_grouped_linear" in found) == quantized


def test_rows_of_tokens_are_gathered_as_codes_with_the_bits_of_quantized_rows() -> None:
    """The largest magnitude of the rows is that of the tokens: every token is in a row."""
    experts = torch.randint(EXPERTS, (32, 2), generator=torch.Generator().manual_seed(1)).int()
    order, place, _ = reference.expert_order(experts, n_experts=EXPERTS)
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    codes, scale = fp8_quantize(x, dtype="e4m3", scaling="current")
    ours = reference.gather_rows(codes, order, place)
    theirs, same = fp8_quantize(reference.gather_rows(x, order, place), dtype="e4m3", scaling="current")
    assert same_bits(ours, theirs) and same_bits(scale, same)
    gathers = [op for op in Model(CONFIG).assembly.programs["micro_first"].ops if op.kind == "gather_rows"]
    assert [op.ins[0].dtype for op in gathers if op.phase == "forward"] == ["e4m3"] * LAYERS
    assert {op.ins[0].dtype for op in gathers if op.phase == "backward"} == {"bf16", "e5m2"}  # dw reads bf16


@pytest.mark.parametrize("lora", [adapter(), adapter(*EXPERTS_OF), {}], ids=["attention", "experts", "full"])
def test_swiglu_writes_the_codes_that_products_of_experts_read(lora: dict[str, Any]) -> None:
    """In bf16 too where adapters or gradients of weights read it, in the place of what it is made of."""
    program = Model(CONFIG, **lora).assembly.programs["micro_first"]
    readers, writers = program.readers(), {v: op for op in program.ops for v in op.outs}
    found = [op for op in program.ops if op.kind in WEIGHTED]
    assert len(found) == 2 * LAYERS and not {"weighted_swiglu", "weighted_swiglu_bwd"} & kinds(program).keys()
    for op in found:
        assert {reader.kind for reader in readers[op.outs[0]]} == {"fp8_grouped_linear"}
        assert op.attrs["wide"] == (lora != adapter())
        assert not any(reader.kind == "fp8_quantize" for v in op.outs for reader in readers.get(v, ()))
    products = [op.ins[0] for op in program.ops if op.kind == "fp8_grouped_linear"]
    assert sum(writers[v].kind in WEIGHTED for v in products) == 2 * LAYERS


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", [{}, *FORMS], ids=str)
def test_codes_have_the_bits_of_those_of_two_ops(form: dict[str, Any], wide: bool) -> None:
    gen = torch.Generator().manual_seed(4)
    gate_up, dy = (2 * torch.randn(64, width, generator=gen).bfloat16() for width in (96, 48))
    routed = (gate_up, torch.rand(32, 2, generator=gen), torch.randperm(64, generator=gen).int())
    amax = torch.tensor([0.5, 0.0])
    for ours, theirs, ins, dtype in (
        (fp8_weighted_swiglu, reference.weighted_swiglu, routed, "e4m3"),
        (fp8_weighted_swiglu_bwd, reference.weighted_swiglu_bwd, (dy, *routed), "e5m2"),
    ):
        given = {"dtype": dtype, "scaling": "current"}
        first, *others = out if isinstance(out := theirs(*ins, **form), tuple) else (out,)
        codes, *scale_and_amax = fp8_quantize(first, amax, **given)
        expected = (codes, *([first] if wide else []), *others, *scale_and_amax)
        found = ours(*ins, amax, **given, wide=wide, **form)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_scales_are_of_all_rows_of_a_layer() -> None:
    """After a step the next one scales by the largest magnitude that the tensor had, of whatever expert."""
    model, seen = Model(CONFIG), dict[str, float]()

    def watch(program: Program, index: int) -> None:
        op = program.ops[index]
        if op.kind in ("fp8_quantize", *WEIGHTED) and ".mlp." in op.ins[-1].name:
            quantized = op.outs[1] if op.kind in WEIGHTED else op.ins[0]
            largest = float(model.buffers.view(quantized, program.name).abs().max())
            seen[op.ins[-1].name] = max(seen.get(op.ins[-1].name, 0.0), largest)

    model.step(after=watch)
    assert len(seen) == 4 * LAYERS
    for name, largest in seen.items():
        maximum = 448.0 if ".x." in name else 57344.0
        assert float(model.state(name.replace(".amax", ".scale"))[1]) == float(torch.tensor(maximum) / largest), name


@pytest.mark.parametrize("lora", [{}, adapter(), adapter(*EXPERTS_OF)], ids=["full", "attention", "experts"])
def test_losses_and_gradients_are_close_to_those_of_bf16(lora: dict[str, Any]) -> None:
    """Every token goes to every expert, so that roundings choose no other ones."""
    config = CONFIG | {"num_experts_per_tok": EXPERTS}
    ours, theirs = Model(config, **lora), Model(config, fp8=False, **lora)
    for model in (ours, theirs):
        model.micro_step(True, 0)
    assert float(ours.view(ours.assembly.loss)) == pytest.approx(float(theirs.view(theirs.assembly.loss)), rel=5e-3)
    left, right = ours.gradients(), theirs.gradients()
    errors = {name: float((left[name] - g).norm() / g.norm()) for name, g in right.items() if g.norm() > 0}
    assert left.keys() == right.keys() and any(".mlp." in name for name in errors) == (lora != adapter())
    assert sum(errors.values()) / len(errors) < 0.18
    ours.update()
    assert [ours.step() for _ in range(3)] == pytest.approx([*_after_first(theirs)], rel=3e-2)


def _after_first(model: Model) -> list[float]:
    model.update()
    return [model.step() for _ in range(3)]


def test_frozen_experts_are_kept_in_fp8_only() -> None:
    """Quantized once, with the transposed copy of the stack that the backward pass reads."""
    model = Model(CONFIG, **adapter(*EXPERTS_OF))
    resident = {v.name: v for v in model.assembly.allocated}
    for i in range(LAYERS):
        for name, shape in (("gate_up", (EXPERTS * 256, 128)), ("down", (EXPERTS * 128, 128))):
            assert f"layers.{i}.mlp.{name}" not in resident
            assert resident[f"fp8.layers.{i}.mlp.{name}"].shape == shape
        assert resident[f"fp8.layers.{i}.mlp.down.transposed"].shape == (128, EXPERTS * 128)
    assert "fp8_transpose" not in kinds(model.assembly.programs["micro_first"])


def test_experts_in_nf4_are_read_as_fp8_copies_of_what_is_stored() -> None:
    stored: dict[str, Any] = {**adapter(*EXPERTS_OF), "weight_format": (NF4, NF4.options())}
    ours, theirs = Model(CONFIG, **stored), Model(CONFIG, fp8=False, **stored)
    program = ours.assembly.programs["micro_first"]
    writers = {v: op.kind for op in program.ops for v in op.outs}
    read = [op.ins[1] for op in program.ops if op.kind == "fp8_grouped_linear"]
    assert len(read) == 4 * LAYERS and {writers[v] for v in read} == {"nf4_to_e4m3"}
    assert [ours.step() for _ in range(3)] == pytest.approx([theirs.step() for _ in range(3)], rel=1e-2)


def test_recomputation_changes_no_bit() -> None:
    plain, saving = (
        Model(CONFIG, **changes) for changes in ({}, {"recompute": frozenset({"block", "rmsnorm", "swiglu"})})
    )
    for model in (plain, saving):
        for _ in range(2):
            model.step()
    assert differing(plain.named("param", "state"), saving.named("param", "state")) == []


@pytest.mark.parametrize("width", [72, 40])
def test_a_projection_of_experts_that_products_cannot_take_stays_in_bf16(width: int) -> None:
    """Its columns are no multiple of 16. The other projection is quantized."""
    model = Model(CONFIG | {"moe_intermediate_size": width})
    found = kinds(model.assembly.programs["evaluate"])
    assert found["fp8_grouped_linear"] == found["grouped_linear"] == LAYERS
    model.step()
