"""Assembly: the documented order of passes, each verified; the seams of adapters and offloading; faulty plugins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from models import harness
from models.harness import (
    OPS,
    PlannedModel,
    random_documents,
    tiny_config,
    valid_tokens,
)
from torch import Tensor

import surogate_core.assembly.verifier
from surogate.reporting.program_listing import listing
from surogate_core.api import (
    AdapterContext,
    AdapterDef,
    Head,
    HFTensor,
    Init,
    LowerContext,
    Merge,
    NoOptions,
    OffloadContext,
    OffloadDef,
    Op,
    OptimizerDef,
    PrecisionRequest,
    Program,
    Programs,
    Scalars,
    Target,
    UpdateContext,
    Value,
    WeightMap,
)
from surogate_core.assembly.assemble import assemble, record
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.assembly.passes import recompute
from surogate_core.assembly.step_inputs import LOGITS_BYTES, auto_lmhead_chunks
from surogate_core.dtypes import DTYPES
from surogate_core.errors import ConfigError, ProgramError
from surogate_core.machine.devices import device
from surogate_core.program.builder import Builder
from surogate_core.program.verify import Checked
from surogate_core.runtime.initialize import initialize
from surogate_models.qwen3 import QWEN3
from surogate_optim_adamw.adamw import ADAMW, AdamWOptions
from surogate_recipes_bf16.recipe import BF16

CONFIG = tiny_config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=8)
ROWS = [[document] for document in random_documents([16, 11], CONFIG["vocab_size"])]
SCALE = 1 / valid_tokens([document for row in ROWS for document in row])
RANK = 3


def plan_inputs(**changes: Any) -> PlanInputs:
    """Enough to assemble the tiny model; `request` is the precision asked for."""
    return harness.plan_inputs(CONFIG, **changes)


def planned(**settings: Any) -> PlannedModel:
    """The tiny model with its weights drawn and its masters made."""
    model = PlannedModel(CONFIG, 2, 16, **settings)
    initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    model.executor.run("start")
    return model


def persistent_bits(model: PlannedModel, *roles: str) -> dict[str, Tensor]:
    values = [v for v in model.assembly.declared if v.role in roles]
    return {v.name: model.buffers.persistent(v).clone().reshape(-1).view(torch.uint8) for v in values}


# ------------------------------------------------------------------------------------------------- adapters, offloading


def low_rank(forward: Program, scalars: Scalars, context: AdapterContext[NoOptions]) -> Program:
    """y = W x + B (A x) for every linear op."""
    b, precision = context.builder, context.precision
    ops: list[Op] = []
    for op in forward.ops:
        if op.kind != "linear":
            ops.append(op)
            continue
        x, w, y = op.ins[0], op.ins[1], op.outs[0]
        with b.record("forward", op.block) as emitted:
            down = b.param(f"{w.name}.A", (RANK, x.shape[1]), Init(kind="normal", std=0.2), precision.adapter)
            up = b.param(f"{w.name}.B", (w.shape[0], RANK), Init(kind="zeros"), precision.adapter)
            base = b.apply("linear", *op.ins, label=y.label, **op.attrs)
            branch = b.apply("linear", b.apply("linear", x, down, label=y.label), up, label=y.label)
            b.emit("add", base, branch, outs=[y])
        ops += emitted
    return replace(forward, ops=tuple(ops))


def is_low_rank(param: Value, stored: WeightMap | None, options: NoOptions) -> bool:
    return param.name.endswith((".A", ".B"))


LOW_RANK = AdapterDef(
    name="low_rank",
    summary="A low-rank branch of every linear op",
    options=NoOptions,
    apply=low_rank,
    trainable=is_low_rank,
    save=lambda tensors, path, base_model, options: None,
    load=lambda path, options: {},
    merge=lambda path: Merge("", {}),
    config_file="adapter.json",
    library="none",
    check=lambda folder, base_dir: None,
    commands=lambda folder, base_model, options: [],
)
ADAPTED: Mapping[str, Any] = {"adapters": [(LOW_RANK, NoOptions())]}


def copies_for_backward(family: Programs, context: OffloadContext) -> Programs:
    """Let the backward ops read a copy of every SwiGLU output: the shape of an offload, without a second memory."""
    return family.with_micro_steps(lambda program: _copies_for_backward(program, context.builder))


def _copies_for_backward(program: Program, b: Builder) -> Program:
    copies: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        for value in op.ins if op.phase == "backward" else ():
            if value.label == "swiglu" and value not in copies:
                with b.record("backward", op.block) as emitted:
                    copies[value] = b.apply("cast", value, dtype=value.dtype, label="fetched")
                ops += emitted
        ins = tuple(copies.get(v, v) for v in op.ins) if op.phase == "backward" else op.ins
        ops.append(replace(op, ins=ins))
    return replace(program, ops=tuple(ops))


def offload(schedule: Callable[[Programs, OffloadContext], Programs]) -> Mapping[str, Any]:
    strategy = OffloadDef(name="copies", summary="for tests", schedule=schedule, selected=lambda options: True)
    return {"offload": [(strategy, NoOptions())], "target": Target(device("h200"))}


# ---------------------------------------------------------------------------------------------------------- the passes


def test_what_plugins_return_and_the_last_program_of_each_name_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[tuple[str, Program]] = []
    real = surogate_core.assembly.verifier.verify

    def recording(program: Program, ops: Any, after: str, checked: Checked) -> None:
        real(program, ops, after, checked)
        verified.append((after, program))

    monkeypatch.setattr(surogate_core.assembly.verifier, "verify", recording)
    assembly = assemble(plan_inputs(**ADAPTED, **offload(copies_for_backward), recompute=frozenset({"ffn"})))
    passes = assembly.passed.passes
    last = {p.program: p for p in passes}
    found = {(after, program.name, len(program.ops)) for after, program in verified}
    assert found >= {(p.name, p.program, p.ops_after) for p in passes if p.by or p is last[p.program]}
    assert len(verified) < len(passes)
    assert set(assembly.programs.values()) <= {program for _, program in verified}
    assert assembly.programs.keys() == {"start", "derive", "micro_first", "micro_next", "evaluate", "update"}


def without_the_first_op(family: Programs, context: LowerContext) -> Programs:
    return replace(family, micro=replace(family.micro, ops=family.micro.ops[1:]))


@pytest.mark.parametrize(
    ("change", "pass_name"),
    [
        ({"adapters": [(replace(LOW_RANK, apply=lambda p, *_: replace(p, ops=p.ops[1:])), NoOptions())]}, "adapter"),
        ({"adapters": [(replace(LOW_RANK, fuse=lambda p, o: replace(p, ops=p.ops[1:])), NoOptions())]}, "fuse"),
        ({"recipe": replace(BF16, lower=without_the_first_op)}, "lower"),
        (offload(lambda f, c: f.with_micro_steps(lambda p: replace(p, ops=p.ops[1:]))), "offload"),
    ],
    ids=["adapter", "adapter's fuse", "recipe", "offload"],
)
def test_a_pass_that_breaks_a_program_is_named(change: dict[str, Any], pass_name: str) -> None:
    with pytest.raises(ProgramError, match=rf"(forward|micro|evaluate) after {pass_name}.*before any op writes it"):
        assemble(plan_inputs(**change))


def test_a_pass_of_core_that_breaks_a_program_is_named_although_others_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks of core's own passes wait until the plan is chosen, also if a later pass cannot handle the program."""
    for broken in (lambda p: replace(p, ops=p.ops[1:]), lambda p: replace(p, ops=(*p.ops, None))):
        monkeypatch.setattr(recompute, "recompute", lambda p, *rest, broken=broken: broken(p))
        with pytest.raises(ProgramError, match=r"^micro after recompute[,:]"):
            assemble(plan_inputs(recompute=frozenset({"ffn"})))


def test_an_adapter_fuses_the_micro_step_alone_after_the_recipe_and_before_recomputation() -> None:
    given: list[Program] = []

    def fuse(program: Program, options: NoOptions) -> Program:
        given.append(program)
        return program

    adapted = [(replace(LOW_RANK, fuse=fuse), NoOptions())]
    assembly = assemble(plan_inputs(adapters=adapted, recompute=frozenset({"ffn"})))
    assert [p.name for p in given] == ["micro"]
    assert not any(op.phase == "recompute" for op in given[0].ops)
    names = [p.name for p in assembly.passed.passes if p.program.startswith("micro")]
    assert names[names.index("lower") :][:4] == ["lower", "dead_code", "fuse", "recompute"]


# ------------------------------------------------------------------------------------------------------------- LM head


def test_auto_lmhead_chunks_is_the_fewest_that_stay_small() -> None:
    for tokens, vocab, dtype in product((1, 7, 96, 4096, 3 * 4096, 32768), (97, 151_936, 1 << 24), ("bf16", "fp32")):
        row = DTYPES[dtype].nbytes(vocab)
        divisors = [c for c in range(1, tokens + 1) if tokens % c == 0]
        small = [c for c in divisors if tokens // c * row <= LOGITS_BYTES]
        assert auto_lmhead_chunks(tokens, vocab, dtype) == (min(small) if small else tokens)


@pytest.mark.parametrize(("model", "matmul"), list(product(("fp32", "bf16"), repeat=2)))
def test_the_logits_that_are_planned_stay_small(model: str, matmul: str) -> None:
    """In the dtype that they have after lowering: fp32 products of a bf16 model make fp32 logits."""
    given = harness.plan_inputs(
        CONFIG | {"vocab_size": 151_936, "max_position_embeddings": 4096},
        request=PrecisionRequest(model_dtype=model, matmul_dtype=matmul),
        seq_len=4096,
    )
    assembly = assemble(given)
    assert 2 * 4096 % assembly.batch.lmhead_chunks == 0
    heads = [op for p in assembly.programs.values() for op in p.ops if op.kind.startswith("lm_head_ce")]
    assert len(heads) == 3
    for op in heads:
        logits = op.ins[0].shape[0] // assembly.batch.lmhead_chunks * DTYPES[matmul].nbytes(151_936)
        assert OPS[op.kind].workspace(op) == logits <= LOGITS_BYTES


def test_chunks_that_do_not_divide_the_tokens_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"lmhead_chunks: 5 does not divide .* = 32 tokens"):
        assemble(plan_inputs(lmhead_chunks=5))


def test_the_number_of_chunks_does_not_change_the_loss() -> None:
    """Only the order of a sum of 25 losses changes: a few fp32 roundings of it, and as many in each gradient."""
    one = planned(lmhead_chunks=1)
    loss = one.micro_step(ROWS, SCALE)
    gradients = {name: grad.clone() for name, grad in one.gradients.items()}
    for chunks in (2, 4, 8, 16, 32):
        other = planned(lmhead_chunks=chunks)
        assert other.micro_step(ROWS, SCALE) == pytest.approx(loss, rel=25 * 2**-24)
        for name, grad in other.gradients.items():
            assert (grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), (chunks, name)


# --------------------------------------------------------------------------------------------------- masters, skipping


MIXTURES = list(product(("fp32", "bf16"), repeat=3))


@pytest.mark.parametrize(("model", "master", "gradient"), MIXTURES)
def test_a_step_whose_norm_is_not_finite_changes_no_bit(model: str, master: str, gradient: str) -> None:
    request = PrecisionRequest(model_dtype=model, master_dtype=master, param_grad_dtype=gradient)
    trained = planned(request=request, max_grad_norm=1.0, weight_decay=0.1)
    kept = {v.name for v in trained.assembly.declared if v.role in ("param", "state")} - {"grad_norm", "step_loss"}
    for scale in (float("nan"), float("inf")):
        before = persistent_bits(trained, "param", "state")
        trained.micro_step(ROWS, scale)
        trained.update(step=1, lr=1e-2)
        assert not torch.isfinite(trained.buffers.persistent(trained.assembly.grad_norm))
        after = persistent_bits(trained, "param", "state")
        assert [name for name in kept if not torch.equal(after[name], before[name])] == []
    trained.micro_step(ROWS, SCALE)
    trained.update(step=1, lr=1e-2)
    assert all(param.isfinite().all() for param in trained.params.values())
    assert not torch.equal(persistent_bits(trained, "param")["embedding"], before["embedding"])


@pytest.mark.parametrize(("model", "master"), list(product(("fp32", "bf16"), repeat=2)))
def test_work_copies_are_what_the_masters_hold_from_the_start(model: str, master: str) -> None:
    trained = planned(request=PrecisionRequest(model_dtype=model, master_dtype=master))
    states = {v.name: v for v in trained.assembly.declared if v.role == "state"}
    for name, param in trained.params.items():
        assert (f"master.{name}" in states) == (model != master)
        if model != master:
            assert torch.equal(trained.buffers.persistent(states[f"master.{name}"]).to(param.dtype), param), name


# ------------------------------------------------------------------------------------------------------- adapter's seam


def adapter_loss(model: PlannedModel) -> float:
    model.write(ROWS, SCALE)
    model.executor.run("evaluate")
    return float(model.buffers.persistent(model.assembly.eval_loss))


def test_frozen_params_cost_nothing_but_their_bytes() -> None:
    assembly = planned(**ADAPTED).assembly
    adapters = {v.name for v in assembly.params.values() if is_low_rank(v, None, NoOptions())}
    frozen = assembly.params.keys() - adapters
    assert len(adapters) == 2 * 4 * 2  # A and B of four linears in two blocks
    assert {v.name for v in assembly.trainable} == adapters
    owners = {v.name.removeprefix("grad.") for v in assembly.declared if v.role == "grad"}
    assert owners == adapters
    states = {v.name for v in assembly.declared if v.role == "state"}
    assert states == {"step_loss", "eval_loss", "grad_norm"} | {f"adamw.{m}.{n}" for m in "mv" for n in adapters}
    for name in ("micro_first", "micro_next"):
        ops = assembly.programs[name].ops
        products = [op for op in ops if op.kind == "linear_wgrad"]
        assert {op.outs[0].name for op in products} == {f"grad.{n}" for n in adapters}
        assert len(products) == len(adapters)
        text = listing(assembly.programs[name])
        assert "embedding_bwd" not in text
        assert not re.search(r"b0 +backward .*d_embedding", text), "the gradient of the frozen embedding's output"
    assert not {v.name for op in assembly.programs["update"].ops for v in (*op.ins, *op.outs)} & frozen


@pytest.mark.parametrize(
    ("model", "master", "lora", "adapter_master"),
    [
        ("bf16", "bf16", "fp32", None),
        ("bf16", "fp32", "fp32", None),
        ("fp32", "bf16", "fp32", None),
        ("bf16", "fp32", "bf16", "fp32"),
        ("bf16", "bf16", "bf16", None),
    ],
)
def test_an_adapter_has_masters_only_where_they_are_wider(
    model: str, master: str, lora: str, adapter_master: str | None
) -> None:
    request = PrecisionRequest(model_dtype=model, master_dtype=master, adapter_dtype=lora)
    assembly = assemble(plan_inputs(request=request, **ADAPTED))
    assert {v.dtype for v in assembly.trainable} == {lora}
    masters = {v.dtype for v in assembly.declared if v.name.startswith("master.")}
    assert masters == ({adapter_master} if adapter_master else set())


def test_an_adapter_that_starts_at_zero_starts_at_the_base_model() -> None:
    adapted, base = planned(**ADAPTED), planned()
    expected = base.micro_step(ROWS, SCALE)
    assert adapted.micro_step(ROWS, SCALE) == expected
    assert adapter_loss(adapted) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("request_", [{"model_dtype": "fp32"}, {"model_dtype": "bf16", "matmul_dtype": "fp32"}])
def test_training_an_adapter_leaves_every_bit_of_the_base(request_: dict[str, str]) -> None:
    model = planned(request=PrecisionRequest(**request_), weight_decay=0.1, **ADAPTED)
    before = persistent_bits(model, "param")
    losses = []
    for step in range(1, 13):
        losses.append(model.micro_step(ROWS, SCALE))
        model.update(step, lr=3e-2)
    after = persistent_bits(model, "param")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {v.name for v in model.assembly.trainable}
    assert losses[-1] < losses[0] - 0.3
    model.micro_step(ROWS, SCALE)
    trained = float(model.buffers.persistent(model.assembly.loss))
    assert adapter_loss(model) == pytest.approx(trained, rel=1e-6)  # evaluation has the adapter
    base = planned(request=PrecisionRequest(**request_))
    assert abs(adapter_loss(base) - trained) > 0.2


def test_adapter_gradients_are_those_of_the_merged_weight() -> None:
    """With W' = W + B A the chain rule gives dB = dW' A^T and dA = B^T dW': all from the plain model's gradients."""
    adapted, merged = planned(**ADAPTED), planned()
    for name, weight in adapted.params.items():
        if name.endswith(".B"):
            weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
            base = name.removesuffix(".B")
            merged.params[base].add_(weight @ adapted.params[f"{base}.A"])
    loss = merged.micro_step(ROWS, SCALE)
    assert adapted.micro_step(ROWS, SCALE) == pytest.approx(loss, rel=1e-5)
    whole = {v.name: merged.buffers.persistent(v) for v in merged.assembly.declared if v.role == "grad"}
    for param in adapted.assembly.trainable:
        base, which = param.name.rsplit(".", 1)
        a, b = adapted.params[f"{base}.A"], adapted.params[f"{base}.B"]
        dw = whole[f"grad.{base}"]
        expected = dw @ a.T if which == "B" else b.T @ dw
        grads = {v.name: v for v in adapted.assembly.declared}
        got = adapted.buffers.persistent(grads[f"grad.{param.name}"])
        assert (got - expected).norm() <= 1e-5 * expected.norm(), param.name


def test_recomputing_an_adapted_block_is_bit_identical() -> None:
    request = PrecisionRequest(model_dtype="bf16", matmul_dtype="fp32")
    results = []
    for parts in ((), ("qkv",), ("att", "ffn"), ("block",)):
        model = planned(request=request, recompute=frozenset(parts), **ADAPTED)
        for name, param in model.params.items():
            if name.endswith(".B"):
                param.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
        loss = model.micro_step(ROWS, SCALE)
        results.append((loss, persistent_bits(model, "grad")))
    for loss, grads in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(bits, results[0][1][name]) for name, bits in grads.items())


def test_an_adapter_must_leave_the_loss_alone() -> None:
    wrong = replace(LOW_RANK, apply=lambda p, *_: replace(p, outputs=()))
    with pytest.raises(ProgramError, match="adapter low_rank returned 0 outputs"):
        assemble(plan_inputs(adapters=[(wrong, NoOptions())]))


def test_an_adapter_that_trains_nothing_is_refused() -> None:
    wrong = replace(LOW_RANK, trainable=lambda param, stored, options: False)
    with pytest.raises(ProgramError, match="depends on no trainable param"):
        assemble(plan_inputs(adapters=[(wrong, NoOptions())]))


# ------------------------------------------------------------------------------------------------------- offload's seam


def test_the_offload_strategy_gets_the_recomputed_family_and_the_device() -> None:
    calls: list[tuple[list[str], set[str], Target | None]] = []

    def schedule(family: Programs, context: OffloadContext) -> Programs:
        phases = {op.phase for op in family.micro.ops}
        calls.append(([program.name for program in family.all()], phases, context.target))
        return copies_for_backward(family, context)

    model = planned(**offload(schedule), recompute=frozenset({"qkv"}))
    names = ["start", "derive", "micro", "evaluate", "update"]
    assert calls == [(names, {"forward", "backward", "recompute"}, Target(device("h200")))]
    for name in ("micro_first", "micro_next"):
        fetched = [op for op in model.assembly.programs[name].ops if op.outs and op.outs[0].label == "fetched"]
        assert len(fetched) == CONFIG["num_hidden_layers"]
    plain = planned()
    assert model.micro_step(ROWS, SCALE) == plain.micro_step(ROWS, SCALE)
    assert all(torch.equal(grad, plain.gradients[name]) for name, grad in model.gradients.items())


# ------------------------------------------------------------------------------------------------------- faulty plugins


def mapped(change: Callable[[list[WeightMap]], list[WeightMap]]) -> dict[str, Any]:
    return {"model": replace(QWEN3, weights=lambda dims: change(list(QWEN3.weights(dims))))}


def reshaped(maps: list[WeightMap], index: int, shape: tuple[int, ...]) -> list[WeightMap]:
    """The map of the first block's qkv with tensor `index` declared in another shape."""
    at = next(i for i, m in enumerate(maps) if m.param == "layers.0.attn.qkv")
    tensors = list(maps[at].tensors)
    tensors[index] = HFTensor(tensors[index].name, shape)
    return [*maps[:at], WeightMap(maps[at].param, tuple(tensors)), *maps[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        (lambda maps: [m for m in maps if m.param != "norm"], r"weight maps and params differ: \['norm'\]"),
        (lambda maps: [*maps, WeightMap("extra", ())], r"weight maps and params differ: \['extra'\]"),
        (lambda maps: [*maps, maps[0]], "mapped twice: embedding, model.embed_tokens.weight"),
        (
            lambda maps: [
                WeightMap(m.param, maps[0].tensors) if m.param == "lm_head" else m for m in maps
            ],
            "mapped twice: model.embed_tokens.weight",
        ),
        (
            lambda maps: reshaped(maps, 0, (31, 24)),
            r"layers.0.attn.qkv is \[64, 24\], its checkpoint tensors make \[31, 24\] \+ \[16, 24\] \+ \[16, 24\]",
        ),
        (lambda maps: reshaped(maps, 2, (16, 23)), r"layers.0.attn.qkv is \[64, 24\].*\[16, 23\]"),
        (lambda maps: reshaped(maps, 0, (32, 24, 1)), r"layers.0.attn.qkv is \[64, 24\].*\[32, 24, 1\]"),
    ],
    ids=["missing", "unknown", "param twice", "tensor twice", "rows", "columns", "dimensions"],
)  # fmt: skip
def test_a_weight_map_that_does_not_fit_is_named(
    change: Callable[[list[WeightMap]], list[WeightMap]], printed: str
) -> None:
    with pytest.raises(ProgramError, match=rf"model qwen3: {printed}"):
        assemble(plan_inputs(**mapped(change)))


@pytest.mark.parametrize("matrices", [2, 4])
def test_a_param_of_checkpoints_with_other_matrices_than_its_tensors_is_refused(matrices: int) -> None:
    """The tensors of its weight map are its matrices: optimizers and formats would work on those without a word."""

    def build(b: Builder, dims: Any, batch: Any) -> Head:
        head = QWEN3.build(b, dims, batch)
        stack = b.param("stack", (8, dims.d_model), Init(kind="ones"), matrices=matrices)
        back = b.param("back", (dims.d_model, 8), Init(kind="ones"))
        return replace(head, x=b.apply("linear", b.apply("linear", head.x, stack), back))

    def weights(dims: Any, tensors: int) -> list[WeightMap]:
        stack = tuple(HFTensor(f"stack.{i}", (8 // tensors, dims.d_model)) for i in range(tensors))
        return [
            *QWEN3.weights(dims),
            WeightMap("stack", stack),
            WeightMap("back", (HFTensor("back", (dims.d_model, 8)),)),
        ]

    right = replace(QWEN3, build=build, weights=lambda dims: weights(dims, matrices))
    names = [matrix.name for param in record(plan_inputs(model=right)).params.values() for matrix in param.matrices]
    assert f"stack.{matrices - 1}" in names
    wrong = replace(right, weights=lambda dims: weights(dims, 1))
    with pytest.raises(
        ProgramError, match=rf"stack \[8, 24\] is declared with matrices={matrices}, and .* have 8 rows"
    ):
        assemble(plan_inputs(model=wrong))


@pytest.mark.parametrize(("shape", "matrices"), [((6, 4), 4), ((4, 2, 2), 2), ((4,), 2), ((4, 2), 0)], ids=str)
def test_only_params_of_two_dimensions_are_equal_matrices(shape: tuple[int, ...], matrices: int) -> None:
    with pytest.raises(ProgramError, match=rf"cannot be {matrices} equal matrices"):
        Builder(harness.OPS, "fp32").param("stack", shape, Init(kind="ones"), matrices=matrices)


def test_a_param_that_the_loss_does_not_use_is_named() -> None:
    def build(b: Builder, dims: Any, batch: Any) -> Head:
        b.param("idle", (3, 4), Init(kind="ones"))
        return QWEN3.build(b, dims, batch)

    model = replace(
        QWEN3,
        build=build,
        weights=lambda dims: [*QWEN3.weights(dims), WeightMap("idle", (HFTensor("idle", (3, 4)),))],
    )
    with pytest.raises(ProgramError, match="trainable but not used by the loss: idle"):
        assemble(plan_inputs(model=model))


@pytest.mark.parametrize("master", ["bf16", "fp32"])
def test_an_optimizer_that_forgets_a_param_is_named(master: str) -> None:
    def update(context: UpdateContext) -> None:
        ADAMW.update(replace(context, params=[p for p in context.params if p.param.name != "norm"]))

    lazy = OptimizerDef(name="lazy", summary="", options=AdamWOptions, update=update)
    names = "norm" if master == "bf16" else "master.norm, norm"
    with pytest.raises(ProgramError, match=f"optimizer lazy never writes: {names}$"):
        assemble(plan_inputs(optimizer=lazy, request=PrecisionRequest(model_dtype="bf16", master_dtype=master)))


def test_an_optimizer_that_forgets_the_work_copies_is_named() -> None:
    """It updates the fp32 masters as if they were the params: nothing would ever train."""

    def update(context: UpdateContext) -> None:
        ADAMW.update(replace(context, params=[replace(p, param=p.master) for p in context.params]))

    lazy = OptimizerDef(name="lazy", summary="", options=AdamWOptions, update=update)
    with pytest.raises(ProgramError, match="optimizer lazy never writes: embedding, "):
        assemble(plan_inputs(optimizer=lazy, request=PrecisionRequest(model_dtype="bf16", master_dtype="fp32")))
