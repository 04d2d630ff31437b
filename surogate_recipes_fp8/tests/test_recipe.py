"""The fp8-hybrid recipe on the CPU, where references quantize exactly: what is lowered, scales, states, training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import covering
import pytest
import torch
from fp8_model import (
    BIASED,
    CONFIG,
    LAYERS,
    PRODUCTS,
    Model,
    differing,
    kinds,
    lora_rank_8,
    operands_under_bf16,
    options,
)
from models.harness import tiny_config
from torch import Tensor

from surogate.runs.saved_values import kept_values
from surogate_core.api import ConfigError, Op, PrecisionRequest, Program, Target, UpdateContext
from surogate_core.assembly.recomputed import PARTS, Recomputation
from surogate_core.testing.devices import DEVICES, device
from surogate_optim_adamw.adamw import ADAMW
from surogate_recipes_fp8.recipe import E4M3_E5M2, FP8_HYBRID

# ----------------------------------------------------------------------------------------------------------- lowering


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["qwen3", "qwen2"])
def test_every_product_of_a_block_is_lowered_and_nothing_else(config: Mapping[str, Any]) -> None:
    programs = Model(config).assembly.programs
    for name in ("micro_first", "micro_next", "calibrate_first", "calibrate_next"):
        found = kinds(programs[name])
        assert found["fp8_linear"] == 3 * PRODUCTS * LAYERS  # forward, dgrad, wgrad
        assert not {"linear", "linear_dgrad", "linear_wgrad", "linear_bgrad"} & found.keys()
        assert found["lm_head_ce_grads"] == found["embedding"] == 1 and found["attention"] == LAYERS
    assert kinds(programs["evaluate"])["fp8_linear"] == PRODUCTS * LAYERS


def test_what_computes_an_operand_quantizes_it() -> None:
    """Only the outputs of attention and of RoPE's backward pass, and the last gradient, take a pass of their own."""
    found = kinds(Model().assembly.programs["micro_first"])
    assert found["fp8_add_rmsnorm"] == 2 * LAYERS - 1 and found["fp8_rmsnorm"] == 1
    assert found["fp8_swiglu"] == found["fp8_swiglu_bwd"] == LAYERS
    assert found["fp8_rmsnorm_bwd"] == 2 * LAYERS
    assert found["fp8_quantize"] == 2 * LAYERS
    assert not {"swiglu", "swiglu_bwd", "rmsnorm"} & found.keys()


def test_the_bias_gradient_is_computed_by_the_op_that_quantizes_dy() -> None:
    program = Model(BIASED).assembly.programs["micro_next"]
    sums = [op for op in program.ops if op.attrs.get("column_sums")]
    assert len(sums) == LAYERS and all(op.outs[2].role == "grad" and op.accumulate == {2} for op in sums)


def test_no_bf16_copy_of_an_operand_is_kept_for_the_backward_pass() -> None:
    def kept(model: Model) -> Counter[str]:
        program, found = model.assembly.programs["micro_first"], Counter[str]()
        written = {v: op for op in program.ops for v in op.outs if op.phase == "forward" and v.block == 1}
        for value in {v for op in program.ops if op.phase == "backward" for v in op.ins if v in written}:
            found[value.label] += value.nbytes
        return found

    ours, theirs = kept(Model()), kept(Model(fp8=False))
    assert ours["norm"] * 2 == theirs["norm"]
    assert "swiglu" not in ours and theirs["swiglu"] > 0
    assert ours["gate_up"] == theirs["gate_up"]


def test_skipped_blocks_stay_in_bf16() -> None:
    program = Model(options={"skip_quant_first_layers": 1, "skip_quant_last_layers": 1}).assembly.programs[
        "micro_first"
    ]
    blocks = {op.block for op in program.ops if op.kind == "fp8_linear"}
    assert blocks == {1}
    assert {op.block for op in program.ops if op.kind == "linear"} == {0, 2}


@pytest.mark.parametrize(
    ("fast", "expected"), [("fprop", (True, False)), ("all", (True, True)), ("none", (False, False))]
)
def test_fast_accumulation_is_chosen_by_the_product(fast: str, expected: tuple[bool, bool]) -> None:
    program = Model(options={"fp8_fast_accum": fast}).assembly.programs["micro_first"]
    products = [op for op in program.ops if op.kind == "fp8_linear"]
    assert {op.attrs["fast"] for op in products if op.phase == "forward"} == {expected[0]}
    assert {op.attrs["fast"] for op in products if op.phase == "backward"} == {expected[1]}


def test_cards_that_multiply_any_layout_need_no_transposed_copies() -> None:
    target = Target(device("b200"))
    program = Model(target=target).assembly.programs["micro_first"]
    assert "fp8_transpose" not in kinds(program)
    assert not [op for op in program.ops if op.attrs.get("transposed")]
    wgrads = [op for op in program.ops if op.kind == "fp8_linear" and op.outs[0].role == "grad"]
    assert len(wgrads) == PRODUCTS * LAYERS and all(op.attrs["trans_a"] and op.attrs["trans_b"] for op in wgrads)


def test_a_layout_without_transposed_copies_computes_the_same() -> None:
    hopper, blackwell = Model(), Model(target=Target(device("b200")))
    for model in (hopper, blackwell):
        model.step()
        model.step()
    assert differing(hopper.named("param"), blackwell.named("param")) == []


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 13, "batch_size": 1}, "multiple of 16 tokens in a micro-step, got 13"),
        ({"options": {"skip_quant_first_layers": 2, "skip_quant_last_layers": 1}}, "leave none of the 3 blocks"),
        (
            {"request": {}, "config": tiny_config(hidden_size=40)},
            r"16 columns in layers.0.attn.qkv, got 40.*without FP8",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Model(changes.pop("config", CONFIG), **changes)


def test_cards_before_ada_and_other_model_dtypes_are_refused() -> None:
    precision = FP8_HYBRID.precision(PrecisionRequest(), options())
    assert (precision.model, precision.matmul, precision.gradient) == ("bf16", "e4m3", "e5m2")
    for definition in (FP8_HYBRID, E4M3_E5M2):
        more = (options(),) if definition is FP8_HYBRID else ()
        assert all(
            definition.supports(d, precision, *more).ok == (d.sm is not None and d.sm >= 89) for d in DEVICES.values()
        )
    with pytest.raises(ConfigError, match="model_dtype: fp32"):
        FP8_HYBRID.precision(PrecisionRequest(model_dtype="fp32"), options())


# -------------------------------------------------------------------------------------------------------------- scales


def quantized_tensors(model: Model, program: Program, index: int) -> dict[str, Tensor]:
    """{name of the amax: the tensor that the op at `index` quantized}, for ops that quantize and record."""
    op: Op = program.ops[index]
    if op.kind != "fp8_quantize" or not op.changes:
        return {}
    return {op.ins[-1].name: model.buffers.view(op.ins[0], program.name)}


def test_scales_equal_a_plain_simulation_of_the_history() -> None:
    model = Model()
    seen: dict[str, float] = {}

    def watch(program: Program, index: int) -> None:
        for name, tensor in quantized_tensors(model, program, index).items():
            seen[name] = max(seen.get(name, 0.0), float(tensor.abs().max()))

    quantizers = [v.name for v in model.assembly.declared if v.name.endswith((".x.amax", ".dy.amax"))]
    assert len(quantizers) == 2 * PRODUCTS * LAYERS
    window: dict[str, list[float]] = {name: [] for name in quantizers}
    for _ in range(7):
        seen.clear()
        for index in range(2):
            model.micro_step(index == 0, 2 * model.steps + index, after=watch)
        found = {name: model.state(name).tolist() for name in quantizers}
        assert seen and all(found[name][0] == largest for name, largest in seen.items())
        model.update()
        for name, (amax, _) in found.items():
            window[name] = [*window[name], amax][-4:]
            maximum = 448.0 if ".x." in name else 57344.0
            encode = torch.tensor(maximum) / torch.tensor(max(window[name]))
            scale = model.state(name.replace(".amax", ".scale"))
            assert torch.equal(scale, torch.stack([1 / encode, encode])), name
            assert not model.state(name).any()


def test_the_first_step_scales_every_tensor_by_itself() -> None:
    model = Model()
    program = model.assembly.programs["calibrate_first"]
    checked = []

    def watch(program: Program, index: int) -> None:
        op = program.ops[index]
        if op.kind == "fp8_quantize":
            tensor, scale = (model.buffers.view(v, program.name) for v in (op.ins[0], op.outs[-1]))
            checked.append(
                float(scale[1])
                == float(torch.tensor(57344.0 if op.phase == "backward" else 448.0) / tensor.abs().max())
            )

    model.micro_step(True, 0, after=watch)
    assert checked and all(checked)
    assert program.purpose == "calibrate" and model.assembly.programs["micro_first"].purpose == "train"


def test_weights_are_scaled_by_their_exact_magnitude_after_every_update() -> None:
    model = Model()
    for _ in range(3):
        for v in model.assembly.declared:
            if v.name in model.assembly.params and f"fp8.{v.name}" in {s.name for s in model.assembly.declared}:
                weight, q, scale = model.view(v), model.state(f"fp8.{v.name}"), model.state(f"fp8.{v.name}.scale")
                assert float(scale[1]) == float(torch.tensor(448.0) / weight.float().abs().max())
                error = (q.float() * scale[0] - weight.float()).norm() / weight.float().norm()
                assert 0 < error < 0.04
        model.step()


def test_the_magnitude_of_a_weight_takes_a_pass_only_if_the_optimizer_does_not_compute_it() -> None:
    def update(context: UpdateContext) -> None:
        ADAMW.update(replace(context, params=[replace(p, amax=None) for p in context.params]))

    writes, writes_none = Model(), Model(optimizer=replace(ADAMW, update=update))
    assert "fp8_amax" not in kinds(writes.assembly.programs["update"])
    assert kinds(writes_none.assembly.programs["update"])["fp8_amax"] == PRODUCTS * LAYERS
    for model in (writes, writes_none):
        for _ in range(2):
            model.step()
    assert not differing(writes.named("param", "state"), writes_none.named("param", "state"))


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_skipped_step_changes_no_state(scale: float, steps: int) -> None:
    model = Model()
    for _ in range(steps):
        model.step()
    before = model.named("param", "state")
    model.step(scale)
    readings = {"grad_norm", "step_loss"}
    changed = set(differing(before, model.named("param", "state"))) - readings
    if steps == 0:  # "never updated" becomes "no value seen", which is the same to every reader but products
        assert all(name.endswith(".scale") and model.state(name).tolist() == [1.0, 0.0] for name in changed)
    else:
        assert not changed
    assert torch.isfinite(torch.tensor(model.step()))


def test_gradients_after_a_skipped_first_step_are_those_of_a_first_step() -> None:
    """Gradients of a step of 100,000 tokens are smaller than any E5M2 number: they need a scale."""
    skipped, fresh = Model(), Model()
    skipped.step(float("inf"))
    for model in (skipped, fresh):
        model.micro_step(True, 7, 1e-5)
    left, right = skipped.gradients(), fresh.gradients()
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_tensor_with_inf_skips_the_step_although_fp8_hides_it() -> None:
    model = Model()
    model.step()
    before = model.named("param")
    model.micro_step(True, 5)
    model.state("fp8.layers.1.attn.o.dy.amax")[1] = 1.0  # what the kernel records beside the finite magnitudes
    model.update()
    assert float(model.view(model.assembly.grad_norm)) == float("inf")
    assert differing(before, model.named("param")) == []


# ----------------------------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("lora", [False, True])
def test_loss_and_gradients_are_close_to_those_of_bf16(config: Mapping[str, Any], lora: bool) -> None:
    """A product is 2.5 to 5 % off, a gradient 4.5 to 8 %; here errors of all products of three blocks add up."""
    settings = lora_rank_8() if lora else {}
    ours, theirs = Model(config, **settings), Model(config, fp8=False, **settings)
    for model in (ours, theirs):
        model.micro_step(True, 0)
    assert float(ours.view(ours.assembly.loss)) == pytest.approx(float(theirs.view(theirs.assembly.loss)), rel=5e-3)
    left, right = ours.gradients(), theirs.gradients()
    errors = {name: float((left[name] - g).norm() / g.norm()) for name, g in right.items() if g.norm() > 0}
    assert left.keys() == right.keys() and max(errors.values()) < 0.5
    assert sum(errors.values()) / len(errors) < 0.15


def test_an_evaluation_before_the_first_step_uses_current_scales_and_none_records() -> None:
    model, theirs = Model(), Model(fp8=False)
    before = model.named("param", "state")
    assert model.evaluate() == pytest.approx(theirs.evaluate(), rel=5e-3)
    assert set(differing(before, model.named("param", "state"))) == {"eval_loss"}
    model.step()
    before = model.named("param", "state")
    first = model.evaluate()
    assert set(differing(before, model.named("param", "state"))) == {"eval_loss"}
    assert model.evaluate() == first


def test_operands_under_the_bf16_recipe_are_scaled_by_themselves() -> None:
    model = Model(**operands_under_bf16())
    assert not [v.name for v in model.assembly.declared if v.name.endswith(".amax")]
    assert not model.assembly.calibrates
    first, theirs = model.step(), Model(fp8=False)
    assert first == pytest.approx(theirs.step(), rel=5e-3)
    assert torch.isfinite(torch.tensor(model.step()))


# -------------------------------------------------------------------------------------------------- memory, recomputing


def test_frozen_weights_are_staged_and_kept_in_fp8_only() -> None:
    model = Model(**lora_rank_8())
    resident = {v.name for v in model.assembly.allocated}
    assert (
        not {f"layers.{i}.{m}" for i in range(LAYERS) for m in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")}
        & resident
    )
    assert {"embedding", "lm_head"} <= resident
    assert [part.program.name for part in model.assembly.staging] == [f"derive.{i}" for i in range(LAYERS)]
    copies = [v for v in model.assembly.allocated if v.derived and v.dtype == "e4m3"]
    assert len(copies) == 2 * PRODUCTS * LAYERS - 1  # no backward product reads the qkv matrix of the first block
    kept = kept_values(model.assembly, {"embedding"}, "bf16")
    assert not [v for v in kept if v.derived]


def test_an_adapter_trains_on_a_frozen_fp8_base() -> None:
    model, theirs = Model(**lora_rank_8()), Model(fp8=False, **lora_rank_8())
    ours = [model.step(lr=2e-2) for _ in range(6)]
    expected = [theirs.step(lr=2e-2) for _ in range(6)]
    assert ours == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("lora", [False, True])
def test_recomputation_changes_no_bit(lora: bool) -> None:
    """Of all parts, and of more of them in the first of three blocks than in the others."""
    settings = lora_rank_8() if lora else {}
    plain, all_of_it = trained(**settings), trained(recompute=frozenset(PARTS), **settings)
    arenas = [m.assembly.memory.arenas["micro_first"].lower_bound for m in (plain, all_of_it)]
    assert arenas[1] < arenas[0]
    chosen = Recomputation(frozenset({"rmsnorm", "swiglu"}), frozenset({"block"}), 1)
    for saving in (all_of_it, trained(recompute_chosen=chosen, **settings)):
        assert differing(plain.named("param", "state"), saving.named("param", "state")) == []


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_pairwise_covering_array_of_recomputation_changes_no_bit(lora: bool) -> None:
    print(f"covering array of seed {covering.SEED}")
    settings = lora_rank_8() if lora else {}
    expected = trained(**settings).named("param", "state")
    for chosen in covering.settings((*PARTS, "chunks"), ("adapter", "block")):
        parts, chunks = chosen - {"chunks"}, 2 if "chunks" in chosen else 1
        saving = trained(recompute=parts, attn_bwd_chunks=chunks, **settings)
        assert differing(expected, saving.named("param", "state")) == [], sorted(chosen)


def trained(**settings: Any) -> Model:
    """Return a model after three steps, of which the first is calibrated."""
    model = Model(**settings)
    for _ in range(3):
        model.step()
    return model


def test_bf16_gradients_are_accumulated_with_stochastic_rounding() -> None:
    model = Model(request={"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16"})
    found = kinds(model.assembly.programs["micro_next"])
    assert found["accumulate_rounded"] > PRODUCTS * LAYERS
    assert torch.isfinite(torch.tensor([model.step() for _ in range(3)])).all()


@pytest.mark.parametrize("settings", [{}, operands_under_bf16()], ids=["evaluation", "under bf16"])
def test_an_infinite_activation_that_nothing_records_makes_the_loss_nan(settings: dict[str, Any]) -> None:
    model = Model(**settings)
    model.view(model.assembly.params["layers.1.attn.norm"]).fill_(torch.inf)
    assert not torch.isfinite(torch.tensor(model.evaluate()))
