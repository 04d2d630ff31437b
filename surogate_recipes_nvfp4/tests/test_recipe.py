"""The nvfp4 recipe on the CPU: what is lowered, memory, options, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.harness import tiny_config
from nvfp4_model import BIASED, CONFIG, LAYERS, PRODUCTS, SIZES, model, named, ops_of, quantizers, trained
from recipe_model import LENGTH, ROWS, Model, differing, kinds, lora_rank_8
from torch import Tensor

from surogate_core.api import ConfigError, NoOptions, PrecisionRequest, Program, Target, Value, WeightFormatDef
from surogate_core.testing.devices import DEVICES, cpu, device
from surogate_core.testing.programs import load_registry
from surogate_qlora_fp4.format import FP4
from surogate_qlora_nf4.format import NF4
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_nvfp4.formats import BLOCK
from surogate_recipes_nvfp4.recipe import E2M1, NVFP4, Nvfp4Options
from surogate_recipes_nvfp4.reference import nvfp4_quantize

ALIGNED = tiny_config(**SIZES | {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64})
"""A model of whose fused weights each matrix begins with an atom of scales."""


def stored_in(format: WeightFormatDef) -> dict[str, Any]:
    return lora_rank_8() | {"weight_format": (format, format.options())}


# ----------------------------------------------------------------------------------------------------------- lowering


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["qwen3", "qwen2"])
def test_every_product_of_a_block_is_lowered_and_nothing_else(config: Mapping[str, Any]) -> None:
    programs = model(config).assembly.programs
    for name in ("micro_first", "micro_next"):
        found = kinds(programs[name])
        assert found["nvfp4_linear"] == 3 * PRODUCTS * LAYERS  # forward, dgrad, wgrad
        assert found["nvfp4_quantize"] == 2 * PRODUCTS * LAYERS  # x and dy of each product
        assert not {"linear", "linear_dgrad", "linear_wgrad"} & found.keys()
    found = kinds(programs["evaluate"])
    assert found["nvfp4_linear"] == found["nvfp4_quantize"] == PRODUCTS * LAYERS

    def others(program: Program) -> Counter[str]:
        products = {"linear", "linear_dgrad", "linear_wgrad", "nvfp4_linear", "nvfp4_quantize"}
        return Counter({kind.removeprefix("nvfp4_"): n for kind, n in kinds(program).items() if kind not in products})

    theirs = Model(config).assembly.programs
    assert all(others(programs[name]) == others(theirs[name]) for name in ("micro_first", "micro_next", "evaluate"))


def test_products_read_the_forms_of_their_operands() -> None:
    """y reads the rows of x, dx those of dy, and dw the columns of both."""
    program = model().assembly.programs["micro_first"]
    writer = {v: (op, i) for op in program.ops for i, v in enumerate(op.outs)}
    for product in ops_of(program, "nvfp4_linear"):
        is_wgrad = product.outs[0].role == "grad"
        left, at = writer[product.ins[0]]
        assert quantizers(program, "x" if product.phase == "forward" else "dy").count(left)
        assert at == (3 if is_wgrad and left.attrs["rows"] else 0) and left.attrs["columns" if is_wgrad else "rows"]
        assert product.ins[:3] == left.outs[at : at + 3]
        if is_wgrad:
            right, at = writer[product.ins[3]]
            assert right in quantizers(program, "x") and product.ins[3:6] == right.outs[at : at + 3]
            assert at == 3 and right.attrs["columns"]
            assert product.attrs["dtype"] == "fp32"
        else:
            assert product.ins[3].name.startswith("nvfp4.layers.") and product.attrs["dtype"] == "bf16"


def test_only_gradients_are_stochastic_only_columns_transformed_and_only_activations_have_4_or_6() -> None:
    assembly = model().assembly
    program = assembly.programs["micro_first"]
    xs, dys = quantizers(program, "x"), quantizers(program, "dy")
    assert len(xs) == len(dys) == PRODUCTS * LAYERS
    assert named(xs, "stochastic") == {None} and named(dys, "stochastic") == {True}
    assert named(xs, "four_over_six") == {True} and named(dys, "four_over_six") == {None}
    assert named(xs + dys, "hadamard") == {True} and named(xs + dys, "square") == {None}
    assert named(quantizers(assembly.programs["evaluate"], "x"), "columns") == {None}
    weights = [op for name in ("derive", "update") for op in ops_of(assembly.only(name), "nvfp4_quantize")]
    assert named(weights, "square") == {True}
    assert all(named(weights, name) == {None} for name in ("stochastic", "four_over_six", "hadamard"))


@pytest.mark.parametrize(
    ("settings", "measuring"),
    [
        ({}, {"nvfp4_swiglu", "nvfp4_swiglu_bwd"}),
        ({"options": {"no_fp4_hadamard": True}}, set()),
        (lora_rank_8(), set()),
    ],
    ids=["full", "without the transform", "lora"],
)
def test_swiglu_and_its_gradient_measure_what_is_quantized_with_the_transform(
    settings: dict[str, Any], measuring: set[str]
) -> None:
    program = model(**settings).assembly.programs["micro_first"]
    writer = {v: op.kind for op in program.ops for v in op.outs}
    measured = [op for op in ops_of(program, "nvfp4_quantize") if op.attrs.get("measured")]
    assert len(measured) == len(measuring) * LAYERS
    assert {writer[v] for op in measured for v in op.ins[:2]} == measuring
    assert kinds(program)["nvfp4_swiglu"] == kinds(program)["nvfp4_swiglu_bwd"] == len(measuring) // 2 * LAYERS


@pytest.mark.parametrize("part", ["swiglu", "block"])
def test_a_recomputed_swiglu_is_not_measured_by_the_quantizer_either(part: str) -> None:
    plain, saving = model(), model(recompute=frozenset({part}))
    again = [op for op in saving.assembly.programs["micro_first"].ops if op.phase == "recompute"]
    assert [op.kind for op in again].count("nvfp4_swiglu") == LAYERS
    assert named([op for op in again if op.ins[0].label == "swiglu"], "measured") == {True}
    assert [plain.step(), plain.step()] == [saving.step(), saving.step()]
    assert differing(plain.named("grad"), saving.named("grad")) == []


def test_every_gradient_has_random_numbers_of_its_own() -> None:
    dys = quantizers(model().assembly.programs["micro_first"], "dy")
    streams = [op.attrs["stream"] for op in dys]
    assert len({*streams, *(stream + 1 for stream in streams)}) == 2 * len(dys)


# ------------------------------------------------------------------------------------------------------ skipped blocks


def test_the_first_block_and_the_last_ones_stay_in_bf16() -> None:
    """A tenth of the blocks, at least two; in a small model one."""
    default = Nvfp4Options()
    found = {blocks: default.skipped(blocks) for blocks in (1, 2, 7, 8, 28, 36, 80)}
    assert found == {1: (0, 0), 2: (0, 1), 7: (0, 1), 8: (1, 2), 28: (1, 3), 36: (1, 4), 80: (1, 8)}
    chosen = Nvfp4Options(skip_quant_first_layers=3, skip_quant_last_layers=0)
    assert {chosen.skipped(blocks) for blocks in (1, 7, 36)} == {(3, 0)}


@pytest.mark.parametrize(
    ("blocks", "options", "expected"),
    [
        (3, {}, {0, 1}),
        (8, {}, {1, 2, 3, 4, 5}),
        (3, {"skip_quant_first_layers": 1, "skip_quant_last_layers": 1}, {1}),
        (8, {"skip_quant_first_layers": 0}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_products_of_skipped_blocks_are_those_of_bf16(blocks: int, options: dict[str, Any], expected: set[int]) -> None:
    program = model(CONFIG | {"num_hidden_layers": blocks}, skip=True, options=options).assembly.programs["micro_first"]
    assert {op.block for op in ops_of(program, "nvfp4_linear")} == expected
    found = {op.block for op in ops_of(program, "linear", "linear_dgrad", "linear_wgrad")}
    assert found == {*range(blocks)} - expected


# ------------------------------------------------------------------------------------------------------------- memory


def test_an_element_that_is_kept_for_the_backward_pass_takes_4_and_a_half_bits() -> None:
    config = CONFIG | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}

    def kept(run: Model) -> Counter[str]:
        program, found = run.assembly.programs["micro_first"], Counter[str]()
        written = {v: op for op in program.ops for v in op.outs if op.phase == "forward" and v.block == 1}
        for value in {v for op in program.ops if op.phase == "backward" for v in op.ins if v in written}:
            found[value.label] += value.nbytes
        return found

    ours, theirs = model(config), Model(config)
    found, before = kept(ours), kept(theirs)
    elements, amax = ROWS * LENGTH * 128, 8
    assert before["swiglu"] == 2 * elements and found["swiglu"] == elements * 4.5 / 8 + amax
    assert before["norm"] == 4 * elements and found["norm"] == 2 * (elements * 4.5 / 8 + amax)
    assert found["gate_up"] == before["gate_up"]
    arenas = [run.assembly.memory.arenas["micro_first"].lower_bound for run in (ours, theirs)]
    assert arenas[0] < arenas[1]


def test_weights_are_quantized_once_a_step_and_products_read_that() -> None:
    run = trained()
    programs = run.assembly.programs
    assert len(ops_of(run.assembly.only("derive"), "nvfp4_quantize")) == PRODUCTS * LAYERS
    assert len(ops_of(run.assembly.only("update"), "nvfp4_quantize")) == PRODUCTS * LAYERS
    assert not [op for name in ("micro_first", "micro_next", "evaluate") for op in programs[name].ops
                if op.kind == "nvfp4_quantize" and op.ins[0].role == "param"]  # fmt: skip
    for value in run.assembly.allocated:
        if value.role == "param" and value.block >= 0 and len(value.shape) == 2:
            codes, scales, amax = nvfp4_quantize(run.view(value), rows=True, columns=False, square=True)
            found = [run.state(f"nvfp4.{value.name}.{part}") for part in ("codes", "scales", "amax")]
            assert torch.equal(found[0], codes) and torch.equal(found[2], amax)
            assert torch.equal(found[1].view(torch.uint8), scales.view(torch.uint8))


def test_frozen_weights_are_quantized_once_and_their_bf16_is_not_kept() -> None:
    run = model(**lora_rank_8())
    assert not ops_of(run.assembly.only("update"), "nvfp4_quantize")
    staged = [op for part in run.assembly.staging for op in ops_of(part.program, "nvfp4_quantize")]
    assert len(staged) == PRODUCTS * LAYERS
    resident = {v.name for v in run.assembly.allocated}
    assert not {f"layers.{i}.{m}" for i in range(LAYERS) for m in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")} & (
        resident
    )


@pytest.mark.parametrize("target", [None, "b200"])
def test_quantized_weights_can_be_held_by_the_host(target: str | None) -> None:
    settings = lora_rank_8() | {"target": Target(device(target)) if target else None}
    quants = load_registry().offload("quants")
    plain, held = model(**settings), model(offload=[(quants, quants.options(offload_quants=True))], **settings)
    assert kinds(held.assembly.programs["micro_first"])["move"] > 3 * PRODUCTS * LAYERS
    assert [plain.step(), plain.step()] == [held.step(), held.step()]
    assert differing(plain.named("grad"), held.named("grad")) == []


# ------------------------------------------------------------------------------------------------------ stored weights


def test_a_weight_that_is_stored_in_fp4_is_read_as_it_is_and_its_input_gradients_are_bf16() -> None:
    run = model(ALIGNED, **stored_in(FP4))
    for name in ("micro_first", "evaluate"):
        program = run.assembly.programs[name]
        products = ops_of(program, "nvfp4_linear", "nvfp4_linear_add")
        assert len(products) == PRODUCTS * LAYERS and {op.phase for op in products} == {"forward"}
        for op in products:
            codes, scales, factors = op.ins[3:6]
            assert {v.role for v in (codes, scales, factors)} == {"state"}
            assert codes.name.endswith(".codes") and factors.shape == (len(op.attrs["stored"]),)
        assert all(op.ins[0].label != "weight" for op in ops_of(program, "nvfp4_quantize"))
    backward = [op for op in run.assembly.programs["micro_first"].ops if op.phase == "backward"]
    products = [op for op in backward if op.kind in ("linear_dgrad", "linear_dgrad_pair")]
    assert len([op for op in products if op.ins[1].label == "weight"]) == PRODUCTS * LAYERS - 1  # none of the first qkv
    assert not {"nvfp4_quantize", "nvfp4_linear"} & {op.kind for op in backward}
    assert not [v for v in run.assembly.allocated if v.name.startswith("nvfp4.")]


@pytest.mark.parametrize(
    ("config", "format", "options"),
    [
        pytest.param("aligned", FP4, {"fp4_weight_blocks": "16x16"}, id="blocks are chosen"),
        pytest.param("aligned", NF4, {}, id="another layout"),
        pytest.param("narrow", FP4, {}, id="matrices begin within an atom of scales"),
    ],
)
def test_other_stored_weights_are_quantized_again(
    config: str, format: WeightFormatDef, options: dict[str, Any]
) -> None:
    run = model(ALIGNED if config == "aligned" else CONFIG, options=options, **stored_in(format))
    products = ops_of(run.assembly.programs["micro_first"], "nvfp4_linear", "nvfp4_linear_add")
    fused = [op for op in products if op.outs[0].label in ("qkv", "gate_up")]
    assert fused and named(fused, "stored") == {None}


def test_gradients_of_an_adapter_on_weights_that_are_not_rounded_twice_are_closer_to_bf16() -> None:
    def gradient(run: Model) -> Tensor:
        run.micro_step(True, 0)
        return torch.cat([g.double().flatten() for g in run.gradients().values()])

    exact = gradient(Model(ALIGNED, **stored_in(FP4)))
    once, twice = (
        float((gradient(model(ALIGNED, options=options, **stored_in(FP4))) - exact).norm() / exact.norm())
        for options in ({}, {"fp4_weight_blocks": "16x16"})
    )
    assert once < 0.7 * twice


@pytest.mark.parametrize("target", [None, "b200"])
def test_stored_weights_train_alike_on_every_backend_and_with_recomputation(target: str | None) -> None:
    settings = stored_in(FP4) | {"target": Target(device(target)) if target else None}
    plain, saving = model(ALIGNED, **settings), model(ALIGNED, recompute=frozenset({"block"}), **settings)
    found, again = ([run.step(lr=2e-2) for _ in range(3)] for run in (plain, saving))
    theirs = Model(ALIGNED, **stored_in(FP4))
    assert found == again == pytest.approx([theirs.step(lr=2e-2) for _ in range(3)], rel=3e-2)
    backends = {op.attrs["backend"] for op in plain.assembly.programs["micro_first"].ops if "stored" in op.attrs}
    assert backends == {"cublaslt" if target else "emulate"}


# ------------------------------------------------------------------------------------------------------------ cublaslt


def test_from_blackwell_on_cublaslt_multiplies_and_reads_transposed_weights() -> None:
    run = model(target=Target(device("b200")))
    products = ops_of(run.assembly.programs["micro_first"], "nvfp4_linear")
    assert {(op.attrs["backend"], op.attrs.get("trans_b", False)) for op in products} == {("cublaslt", False)}
    written = ops_of(run.assembly.only("update"), "nvfp4_quantize")
    assert named(written, "columns") == {True} and len(written) == PRODUCTS * LAYERS
    emulated = model(target=Target(device("h200"))).assembly
    assert named(ops_of(emulated.programs["micro_first"], "nvfp4_linear"), "backend") == {"emulate"}
    assert named(ops_of(emulated.only("update"), "nvfp4_quantize"), "columns") == {None}


def test_without_a_backward_product_a_weight_has_no_transposed_form() -> None:
    """The input of the first qkv needs no gradient if the embedding is frozen."""
    run = model(target=Target(device("b200")), **lora_rank_8())
    turned = [v.name for v in run.assembly.allocated if v.name.endswith(".transposed.codes")]
    assert len(turned) == PRODUCTS * LAYERS - 1 and "nvfp4.layers.0.attn.qkv.transposed.codes" not in turned


@pytest.mark.parametrize("lora", [False, True])
def test_both_backends_compute_the_same(lora: bool) -> None:
    """Square blocks hold the same numbers in both forms. Sums may differ by their order."""
    settings = lora_rank_8() if lora else {}
    emulated, blackwell = model(**settings), model(target=Target(device("b200")), **settings)
    for run in (emulated, blackwell):
        run.micro_step(True, 0)
    left, right = emulated.gradients(), blackwell.gradients()
    for name, grad in right.items():
        assert float((left[name] - grad).norm()) <= 1e-5 * float(grad.norm()), name
    for run in (emulated, blackwell):
        run.update()
    assert emulated.evaluate() == pytest.approx(blackwell.evaluate(), rel=1e-4)


# ------------------------------------------------------------------------------------------------------------- options


def attributes(run: Model) -> dict[str, list[tuple[str, Value | None, dict[str, Any]]]]:
    """{program: its ops of this package}: kind, weight that is quantized, attributes."""
    programs = {p.name: p for p in (*run.assembly.programs.values(), run.assembly.only("derive"))}
    return {
        name: [
            (op.kind, op.ins[0] if op.ins[0].role == "param" else None, {"phase": op.phase, **op.attrs})
            for op in program.ops
            if op.kind.startswith(("nvfp4_quantize", "nvfp4_linear"))
        ]
        for name, program in programs.items()
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, set()),
        ({"fp4_backend": "emulate"}, set()),
        (
            {"fp4_backend": "cublaslt"},
            {("y", "backend"), ("dx", "backend"), ("dx", "trans_b"), ("dw", "backend"), ("w", "columns")},
        ),
        ({"fp4_four_over_six": True}, set()),
        ({"fp4_four_over_six": False}, {("x", "four_over_six")}),
        ({"fp4_four_over_six": "all"}, {("dy", "four_over_six"), ("w", "four_over_six")}),
        ({"fp4_weight_blocks": "16x16"}, set()),
        ({"fp4_weight_blocks": "1x16"}, {("w", "square")}),
        (
            {"no_fp4_hadamard": True},
            {("x", "hadamard"), ("dy", "hadamard"), ("x", "measured"), ("dy", "measured")},
        ),
        ({"no_fp4_stochastic_rounding": True}, {("dy", "stochastic"), ("dy", "stream")}),
    ],
    ids=lambda given: str(given if isinstance(given, dict) else sorted(given)),
)
def test_a_key_changes_what_it_says_and_nothing_else(options: dict[str, Any], expected: set[tuple[str, str]]) -> None:
    found: set[tuple[str, str]] = set()
    ours, changed = attributes(model()), attributes(model(options=options))
    for name, ops in ours.items():
        for (kind, weight, old), (other, _, new) in zip(ops, changed[name], strict=True):
            assert kind == other
            forward = old["phase"] == "forward"
            if kind == "nvfp4_quantize":
                what = "w" if weight is not None else "x" if forward else "dy"
            else:
                what = "y" if forward else "dw" if old["dtype"] == "fp32" else "dx"
            names = old.keys() | new.keys()
            found |= {(what, key) for key in names if (old.get(key) or None) != (new.get(key) or None)}
    assert found == expected


@pytest.mark.parametrize(
    "options",
    [
        {"fp4_four_over_six": False},
        {"fp4_four_over_six": "all"},
        {"fp4_weight_blocks": "1x16"},
        {"fp4_weight_blocks": "1x16", "fp4_backend": "cublaslt", "fp4_four_over_six": "all"},
        {"no_fp4_hadamard": True},
        {"no_fp4_stochastic_rounding": True},
    ],
    ids=str,
)
def test_every_choice_trains_and_gives_other_gradients(options: dict[str, Any]) -> None:
    ours, other = model(), model(options=options)
    for run in (ours, other):
        run.micro_step(True, 0)
    name = "layers.1.mlp.down"
    left, right = ours.gradients()[name], other.gradients()[name]
    assert not torch.equal(left, right)
    assert float((left - right).norm() / left.norm()) < 0.8
    other.update()
    assert torch.isfinite(torch.tensor(other.step()))


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 33, "batch_size": 1}, "NVFP4 products need a multiple of 32 tokens in a micro-step, got 33"),
        (
            {"config": tiny_config(**SIZES | {"hidden_size": 48})},
            r"32 columns in layers.0.attn.qkv, got 48.*recipe: bf16",
        ),
        ({"options": {"skip_quant_first_layers": 2, "skip_quant_last_layers": 1}}, "leave none of the 3 blocks"),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(changes.pop("config", CONFIG), **changes)


def test_other_model_dtypes_are_refused() -> None:
    precision = NVFP4.precision(PrecisionRequest(), Nvfp4Options())
    assert (precision.model, precision.matmul, precision.gradient) == ("bf16", "e2m1", "e2m1")
    with pytest.raises(ConfigError, match=r"model_dtype: fp32: recipe nvfp4 needs bf16\. Remove the key\."):
        NVFP4.precision(PrecisionRequest(model_dtype="fp32"), Nvfp4Options())


def test_every_gpu_from_ampere_on_and_the_cpu_are_supported() -> None:
    precision, options = NVFP4.precision(PrecisionRequest(), Nvfp4Options()), Nvfp4Options()
    turing = replace(device("a100"), sm=75, title="NVIDIA T4")
    for of in (NVFP4.supports(turing, precision, options), E2M1.supports(turing, precision)):
        assert not of.ok and "NVFP4 needs SM80 (Ampere) or newer, NVIDIA T4 is SM75" in of.reason
    for at in (cpu(), *DEVICES.values()):
        assert NVFP4.supports(at, precision, options).ok and E2M1.supports(at, precision).ok


@pytest.mark.parametrize("name", ["cutlass", "cudnn"])
def test_libraries_of_which_there_are_no_products_are_refused(name: Any) -> None:
    options = Nvfp4Options(fp4_backend=name)
    for at in (cpu(), device("b200")):
        found = NVFP4.supports(at, NVFP4.precision(PrecisionRequest(), options), options)
        assert not found.ok and f"fp4_backend: {name}: this package has no products by {name}" in found.reason
        assert "Use fp4_backend: auto" in found.reason


def test_fp4_products_are_refused_where_no_tensor_core_has_them() -> None:
    options = Nvfp4Options(fp4_backend="cublaslt")
    precision = NVFP4.precision(PrecisionRequest(), options)
    assert {at.name for at in DEVICES.values() if NVFP4.supports(at, precision, options).ok} == {
        at.name for at in DEVICES.values() if "fp4" in at.flops
    }
    found = NVFP4.supports(device("h200"), precision, options)
    assert "FP4 products need SM100 (Blackwell) or newer, NVIDIA H200 is SM90" in found.reason


# ------------------------------------------------------------------------------------------------------ under bf16


def test_operands_under_the_bf16_recipe_are_those_of_the_defaults() -> None:
    precision = BF16.precision(PrecisionRequest(matmul_dtype="e2m1", gradient_dtype="e2m1"), NoOptions())
    under_bf16 = Model(CONFIG, precision=precision, lowering=E2M1)
    defaults = model(skip=True)
    for _ in range(2):
        assert under_bf16.step() == defaults.step()
    assert differing(under_bf16.named("param"), defaults.named("param")) == []


def test_blocks_are_along_the_summed_dimension() -> None:
    """The scales of each operand: one for 16 elements of the dimension that both share."""
    for op in ops_of(model(target=Target(device("b200"))).assembly.programs["micro_first"], "nvfp4_linear"):
        a, b = op.ins[0], op.ins[3]
        assert a.shape[1] == b.shape[1] and not a.shape[1] % BLOCK
        assert op.outs[0].shape == (a.shape[0], b.shape[0])
