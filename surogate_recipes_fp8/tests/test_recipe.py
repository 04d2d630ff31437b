"""The fp8-hybrid recipe on the CPU, where references quantize exactly: what is lowered, scales, states, training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.harness import OPS, plan_inputs, random_documents, tiny_config, valid_tokens
from torch import Tensor

from surogate_core.api import NoOptions, Op, PrecisionRequest, Program, Target, UpdateContext, Value
from surogate_core.checkpoint.states import kept_values
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import DEVICES, device
from surogate_core.planning.assemble import assemble
from surogate_core.planning.assembly import Assembly
from surogate_core.planning.recomputed import PARTS
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.initialise import initialise
from surogate_core.runtime.reference import ReferenceExecutor
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_optim_adamw.adamw import ADAMW
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_fp8.recipe import E4M3_E5M2, FP8_HYBRID, Fp8Options

LAYERS, ROWS, LENGTH, VOCABULARY = 3, 2, 32, 64
CONFIG = tiny_config(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=LAYERS, head_dim=16)
BIASED = tiny_config(
    model_type="qwen2", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=80, num_hidden_layers=LAYERS
)
PRODUCTS = 4
"""Products with a weight of a block: qkv, o, gate_up, down."""


def options(**changes: Any) -> Fp8Options:
    return Fp8Options.model_validate({"fp8_amax_history": 4} | changes)


class Model:
    """A tiny model in planned buffers. Memory of dead values is poisoned."""

    def __init__(self, config: Mapping[str, Any] = CONFIG, *, fp8: bool = True, **changes: Any) -> None:
        request = PrecisionRequest(model_dtype="bf16", **changes.pop("request", {}))
        settings: dict[str, Any] = {"batch_size": ROWS, "seq_len": LENGTH, "max_documents": ROWS * LENGTH}
        if fp8:
            chosen = options(**changes.pop("options", {}))
            settings |= {"recipe": FP8_HYBRID, "recipe_options": chosen}
            settings["precision"] = FP8_HYBRID.precision(request, chosen)
        else:
            settings["request"] = request
        self.inputs = plan_inputs(config, **(settings | changes))
        self.assembly: Assembly = assemble(self.inputs)
        self.buffers = Buffers(self.assembly.memory, poison=True)
        self.executor = ReferenceExecutor(self.assembly.all_programs, OPS, self.buffers, poison=True)
        self.view = self.buffers.persistent
        self.steps = 0
        self.calibrating = True
        initialise((v for v in self.assembly.resident if v.init), self.view, 3)
        for part in self.assembly.staging:
            places = part.places.items()
            initialise(part.places, {p: self.buffers.view(v, part.program.name) for p, v in places}.__getitem__, 3)
            self.executor.run(part.program.name)
        self.executor.run("start")
        self.executor.run("derive")

    def write(self, seed: int, scale: float | None = None) -> None:
        documents = random_documents([LENGTH] * ROWS, VOCABULARY, seed)
        batch, tokens = self.assembly.batch, ROWS * LENGTH
        contents: dict[Value, Any] = {
            batch.tokens: [token for document in documents for token in document],
            batch.targets: [target for document in documents for target in (*document[1:], -100)],
            batch.positions: [*range(LENGTH)] * ROWS,
            batch.cu_seqlens: [i * LENGTH for i in range(ROWS)] + [tokens] * (batch.cu_seqlens.shape[0] - ROWS),
            batch.loss_scale: 1 / valid_tokens(documents) if scale is None else scale,
        }
        for value, content in contents.items():
            self.view(value).copy_(torch.tensor(content, dtype=self.view(value).dtype))

    def micro_step(self, first: bool, seed: int, scale: float | None = None, after: Any = None) -> None:
        self.write(seed, scale)
        program = self.assembly.micro_step(first=first, last=not first, calibrating=self.calibrating)
        self.executor.walk(program.name, (lambda index: after(program, index)) if after else (lambda index: None))

    def step(self, scale: float | None = None, after: Any = None, lr: float = 1e-2) -> float:
        """Run an optimizer step of two micro-steps. Return its loss."""
        for index in range(2):
            self.micro_step(index == 0, 2 * self.steps + index, scale, after)
        return self.update(lr)

    def update(self, lr: float = 1e-2) -> float:
        self.steps += 1
        scalars = self.assembly.scalars
        for value, content in ((scalars.lr, lr), (scalars.step, self.steps), (scalars.micro_step, self.steps)):
            self.view(value).fill_(content)
        loss = float(self.view(self.assembly.loss))
        self.executor.run("update")
        self.calibrating &= not self.view(self.assembly.grad_norm).isfinite()
        return loss

    def evaluate(self, seed: int = 99) -> float:
        self.write(seed, 1.0)
        self.executor.run("evaluate")
        return float(self.view(self.assembly.eval_loss))

    def named(self, *roles: str) -> dict[str, Tensor]:
        values = (v for v in self.assembly.resident if v.role in roles)
        return {v.name: self.view(v).clone().reshape(-1).view(torch.uint8) for v in values}

    def state(self, name: str) -> Tensor:
        return self.view(next(v for v in self.assembly.declared if v.name == name))

    def gradients(self) -> dict[str, Tensor]:
        grads = {v.name.removeprefix("grad."): v for v in self.assembly.declared if v.role == "grad"}
        return {name: self.view(v).float().clone() for name, v in grads.items()}


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def kinds(program: Program) -> Counter[str]:
    return Counter(op.kind for op in program.ops)


def lora_rank_8() -> dict[str, Any]:
    return {"adapters": [(LORA, LoraOptions.model_validate({"lora_rank": 8}))]}


def operands_under_bf16() -> dict[str, Any]:
    """The settings of `recipe: bf16` with FP8 operands."""
    precision = BF16.precision(PrecisionRequest(matmul_dtype="e4m3", gradient_dtype="e5m2"), NoOptions())
    return {"fp8": False, "precision": precision, "lowering": E4M3_E5M2}


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
            {"request": {}, "config": tiny_config(intermediate_size=72)},
            r"16 columns in layers.0.mlp.down, got 72.*without FP8",
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
    assert program.calibrating and not model.assembly.programs["micro_first"].calibrating


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
    resident = {v.name for v in model.assembly.resident}
    assert (
        not {f"layers.{i}.{m}" for i in range(LAYERS) for m in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")}
        & resident
    )
    assert {"embedding", "lm_head"} <= resident
    assert [part.program.name for part in model.assembly.staging] == [f"derive.{i}" for i in range(LAYERS)]
    copies = [v for v in model.assembly.resident if v.derived and v.dtype == "e4m3"]
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
    settings = lora_rank_8() if lora else {}
    plain, all_of_it = Model(**settings), Model(**settings, recompute=frozenset(PARTS))
    for model in (plain, all_of_it):
        for _ in range(3):
            model.step()
    arenas = [m.assembly.memory.arenas["micro_first"].lower_bound for m in (plain, all_of_it)]
    assert arenas[1] < arenas[0]
    assert differing(plain.named("param", "state"), all_of_it.named("param", "state")) == []


@pytest.mark.parametrize("part", ["block", "rmsnorm", "swiglu"])
@pytest.mark.parametrize("lora", [False, True])
def test_recomputation_of_operands_under_the_bf16_recipe_changes_no_bit(part: str, lora: bool) -> None:
    settings = operands_under_bf16() | (lora_rank_8() if lora else {})
    plain, recomputed = Model(**settings), Model(**settings, recompute=frozenset({part}))
    for model in (plain, recomputed):
        model.step()
    assert differing(plain.named("param", "state"), recomputed.named("param", "state")) == []


def test_steps_repeat_to_the_bit() -> None:
    runs = [Model(), Model()]
    for model in runs:
        for _ in range(3):
            model.step()
        model.evaluate()
    assert differing(runs[0].named("param", "state"), runs[1].named("param", "state")) == []


def test_bf16_gradients_are_accumulated_with_stochastic_rounding() -> None:
    model = Model(request={"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16"})
    found = kinds(model.assembly.programs["micro_next"])
    assert found["accumulate_rounded"] > PRODUCTS * LAYERS
    assert torch.isfinite(torch.tensor([model.step() for _ in range(3)])).all()
