"""Row tiles: losses and gradients of a run do not change, memory falls, and `verify` knows rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from models.harness import OPS, PlannedModel, random_documents, tiny_config
from small_programs import INIT
from torch import Tensor

from surogate_core.api import Builder, NoOptions, PrecisionRequest, Program, ProgramError
from surogate_core.program.passes import sum_in_blocks
from surogate_core.program.passes.in_place import in_place
from surogate_core.program.passes.tile import tile
from surogate_core.program.verify import verify
from surogate_core.testing.programs import initialize
from surogate_lora import gradients
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_offload_residual.plugin import surogate_offload_strategies

TOKENS = 512
LENGTHS = [200, 1, 130, 181]
"""Documents that begin and end inside of tiles, and one that is longer than a tile."""
_, RESIDUAL = surogate_offload_strategies()
ON_HOST: dict[str, Any] = {"offload": [(RESIDUAL, NoOptions())]}
WHOLE = frozenset({"block"})
BF16, FP32 = PrecisionRequest(model_dtype="bf16"), PrecisionRequest(model_dtype="fp32")

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

Result = tuple[list[Any], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MANY_ROWS", 128)
    monkeypatch.setattr(sum_in_blocks, "BLOCK", 128)
    monkeypatch.setattr(sum_in_blocks, "SMALL", 0)  # the adapters of a tiny model are large beside its activations


def planned(lora: bool = True, **settings: Any) -> PlannedModel:
    adapters = {"adapters": [(LORA, LoraOptions(lora_rank=8))]} if lora else {}
    config = settings.pop("config", {})
    return PlannedModel(tiny_config(**config), 1, TOKENS, **{"request": BF16} | adapters | settings)


def trained(model: PlannedModel) -> Result:
    """The losses of two micro-steps, and the gradients after them."""
    initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    for index, value in enumerate(v for v in model.assembly.trainable if v.name.endswith(("lora_A", "lora_B"))):
        model.params[value.name].normal_(0, 0.1, generator=torch.Generator().manual_seed(index))
    rows = [random_documents(LENGTHS, tiny_config()["vocab_size"], 5)]
    losses = [model.micro_step(rows, 0.1, first=first) for first in (True, False)]
    grads = (v for v in model.assembly.declared if v.role == "grad")
    return losses, {v.name: model.buffers.persistent(v).clone() for v in grads}


def arena(model: PlannedModel) -> int:
    return model.assembly.memory.arena_bytes


# -------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def untiled() -> Callable[..., Result]:
    known: dict[Any, Result] = {}

    def result(**settings: Any) -> Result:
        key = repr(sorted(settings.items()))
        if key not in known:
            known[key] = trained(planned(**settings))
        return known[key]

    return result


@pytest.mark.parametrize(
    ("rows", "recompute", "offload"),
    [
        *product([128, 256], [frozenset(), WHOLE], [{}]),
        (128, WHOLE, ON_HOST),
        (384, WHOLE, {}),
        (128, frozenset({"ffn"}), {}),
    ],
)
def test_lora_has_the_bits_of_the_run_without_tiles(
    rows: int, recompute: frozenset[str], offload: Mapping[str, Any], untiled: Callable[..., Result]
) -> None:
    """Sums over rows are made in blocks, also where a tile has three of them and the last tile one."""
    losses, grads = trained(planned(recompute=recompute, row_tiles=rows, **offload))
    expected_losses, expected = untiled()
    assert losses == expected_losses
    assert grads.keys() == expected.keys() and all(torch.equal(grads[n], expected[n]) for n in expected)


@pytest.mark.parametrize("offload", [{}, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("recompute", [frozenset(), WHOLE], ids=["kept", "recomputed"])
def test_dropout_drops_the_same_elements_in_tiles(
    recompute: frozenset[str], offload: Mapping[str, Any], untiled: Callable[..., Result]
) -> None:
    adapters: dict[str, Any] = {"adapters": [(LORA, LoraOptions(lora_rank=8, lora_dropout=0.2))]}
    model = planned(row_tiles=128, recompute=recompute, **adapters, **offload)
    ops = [op for op in model.assembly.programs["micro_first"].ops if op.kind == "lora_dropout"]
    assert {op.attrs.get("row", 0) for op in ops} == {0, 128, 256, 384}
    losses, grads = trained(model)
    expected_losses, expected = untiled(**adapters)
    assert losses == expected_losses
    assert all(torch.equal(grads[n], expected[n]) for n in expected)


def test_gradients_of_dropped_inputs_are_summed_in_tiles_and_nothing_has_all_rows_for_them() -> None:
    adapters: dict[str, Any] = {"adapters": [(LORA, LoraOptions(lora_rank=8, lora_dropout=0.2))]}
    model = planned(row_tiles=128, recompute=WHOLE, **adapters)
    assert rows_of(model, "lora_wgrad") == rows_of(model, "lora_join") == rows_of(model, "lora_split") == {128}
    program = model.assembly.programs["micro_next"]
    wide = tiny_config()["hidden_size"]
    dropped = [v for op in program.ops if op.kind == "lora_dropout" for v in op.outs]
    assert dropped and {v.root.shape[0] for v in dropped if v.shape[1] >= wide} == {128}


@pytest.mark.parametrize("rows", [0, 128])
@pytest.mark.parametrize("more", [frozenset(), frozenset({"adapter"})], ids=["pairs", "pairs and adapter"])
@pytest.mark.parametrize("offload", [{}, ON_HOST], ids=["device", "host"])
def test_pairs_of_blocks_have_the_bits_of_a_run_that_recomputes_nothing(
    rows: int, more: frozenset[str], offload: Mapping[str, Any], untiled: Callable[..., Result]
) -> None:
    """Of 7 blocks the inputs of 1, 3 and 5 are kept, and those of 2, 4 and 6 computed from them: three blocks run once
    more, and half of the residuals are on the host."""
    seven: dict[str, Any] = {"config": {"num_hidden_layers": 7}}
    model = planned(recompute=more | {"pairs"}, row_tiles=rows, **offload, **seven)
    losses, grads = trained(model)
    expected_losses, expected = untiled(**seven)
    assert losses == expected_losses
    assert all(torch.equal(grads[n], expected[n]) for n in expected)
    ops = model.assembly.programs["micro_first"].ops
    assert sum(op.kind == "attention" for op in ops) == 7 + 7 + 3
    if offload:
        whole = planned(recompute=more | {"block"}, row_tiles=rows, **offload, **seven)
        copied = [
            {op.outs[0].block for op in m.assembly.programs["micro_first"].ops if op.lane == "to_host"}
            for m in (model, whole)
        ]
        assert (copied[0], copied[1]) == ({-1, 1, 3}, {-1, 1, 2, 3, 4})


@pytest.mark.parametrize(
    "settings",
    [
        {"request": FP32},
        {"request": FP32, "recompute": WHOLE},
        {"config": {"model_type": "gemma2", "sliding_window": 60, "query_pre_attn_scalar": 16}, "request": FP32},
        {"config": EXPERTS, "request": FP32},
    ],
    ids=["fp32", "recomputed", "windows and GeGLU", "experts"],
)
def test_all_weights_have_the_losses_and_their_gradients_but_for_the_order_of_sums(
    settings: dict[str, Any], untiled: Callable[..., Result]
) -> None:
    model = planned(lora=False, row_tiles=128, **settings)
    assert any(op.outs and op.outs[0].root is not op.outs[0] for op in model.assembly.programs["micro_first"].ops)
    losses, grads = trained(model)
    expected_losses, expected = untiled(lora=False, **settings)
    assert losses == expected_losses
    for name, grad in expected.items():
        assert torch.allclose(grads[name], grad, rtol=0, atol=1e-5 * float(grad.abs().max() + 1e-30)), name


def rows_of(model: PlannedModel, kind: str) -> set[int]:
    """The rows of the first inputs of ops of a kind."""
    return {op.ins[0].shape[0] for op in model.assembly.programs["micro_next"].ops if op.kind == kind}


@pytest.mark.parametrize("recompute", [frozenset(), WHOLE])
def test_adapters_of_attention_beside_experts_have_the_bits_too(
    recompute: frozenset[str], untiled: Callable[..., Result]
) -> None:
    """A tile sorts its own rows by expert: two for each of its tokens."""
    model = planned(config=EXPERTS, recompute=recompute, row_tiles=128)
    assert rows_of(model, "grouped_linear") == {256} and rows_of(model, "expert_order") == {128}
    losses, grads = trained(model)
    expected_losses, expected = untiled(config=EXPERTS)
    assert losses == expected_losses and all(torch.equal(grads[name], expected[name]) for name in expected)


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 60,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_bias": True,
}


@pytest.mark.parametrize("recompute", [frozenset(), WHOLE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("config", [EXPERTS, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_run_in_tiles_and_their_gradients_are_summed_tile_by_tile(
    config: dict[str, Any], recompute: frozenset[str], untiled: Callable[..., Result]
) -> None:
    """All else has the same bits: losses, and the gradients of adapters of attention."""
    options = LoraOptions(lora_rank=8, lora_target_parameters=("experts.gate_up_proj", "experts.down_proj"))
    settings: dict[str, Any] = {"adapters": [(LORA, options)], "config": config}
    model = planned(**settings, recompute=recompute, row_tiles=128)
    kinds = ("grouped_linear", "grouped_linear_wgrad", "lora_scale")
    assert [rows_of(model, kind) for kind in kinds] == [{256}] * 3 and rows_of(model, "expert_order") == {128}
    losses, grads = trained(model)
    expected_losses, expected = untiled(**settings)
    assert losses == expected_losses and expected.keys() == grads.keys()
    for name, grad in expected.items():
        if "experts" in name:
            assert torch.allclose(grads[name], grad, rtol=0, atol=1e-5 * float(grad.abs().max())), name
        else:
            assert torch.equal(grads[name], grad), name
    assert recompute == frozenset() or arena(model) < 0.8 * arena(planned(**settings, recompute=recompute))


def test_experts_that_one_op_reads_whole_are_not_divided() -> None:
    """Gradients in bf16 are summed at once, from rows that are sorted by one order of all tokens."""
    settings: dict[str, Any] = {"lora": False, "config": EXPERTS, "request": replace(BF16, param_grad_dtype="bf16")}
    tiled, whole = (planned(**settings, row_tiles=rows) for rows in (128, 0))
    assert rows_of(tiled, "grouped_linear") == {1024} and rows_of(tiled, "expert_order") == {512}
    one, other = trained(tiled), trained(whole)
    assert one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in other[1])


def test_what_holds_for_the_rows_of_a_tile_is_read_in_tiles_also_where_no_value_becomes_smaller() -> None:
    b = Builder(OPS, "fp32")
    y, experts = b.input("y", (1024, 6), "fp32"), b.input("experts", (512, 2), "int32")
    with b.record("forward"):
        order, place, _ = b.emit("expert_order", experts, n_experts=4)
        rows = b.apply("copy", y)
        total = b.apply("square_sums", rows, chunks=(1,))
        out = b.apply("sum_rows", rows, order, place, k=2)
        tiled = tile(b.program("alone", (total, out)), 512, 128, b)
    assert [op.ins[0].shape[0] for op in tiled.ops if op.kind == "sum_rows"] == [256] * 4


def test_gradients_in_bf16_are_summed_at_once() -> None:
    """Adding tiles to them would round them once a tile."""
    settings: dict[str, Any] = {"lora": False, "request": replace(BF16, param_grad_dtype="bf16")}
    tiled, whole = (trained(planned(**settings, row_tiles=rows)) for rows in (128, 0))
    assert tiled[0] == whole[0] and all(torch.equal(tiled[1][name], whole[1][name]) for name in whole[1])


WIDE: dict[str, Any] = {"config": {"intermediate_size": 640}}


@pytest.mark.parametrize("lora", [True, False])
def test_recomputed_runs_take_less_memory(lora: bool) -> None:
    sizes = [arena(planned(lora, recompute=WHOLE, row_tiles=rows, **WIDE)) for rows in (0, 256, 128)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_what_only_a_stretch_reads_has_the_rows_of_a_tile() -> None:
    program = planned(recompute=WHOLE, row_tiles=128).assembly.programs["micro_next"]
    shapes = {v.label: v.shape[0] for op in program.ops for v in op.outs if v.block == 1}
    assert {shapes[label] for label in ("gate_up", "swiglu", "d_gate_up", "qkv", "norm", "attn_out")} == {128}
    written = {v.root.label for op in program.ops for v in op.outs if v.root is not v and v.block == 1}
    assert {"rope", "residual", "d_residual"} <= written and not written & {"gate_up", "swiglu", "d_gate_up", "qkv"}


def test_evaluations_run_in_tiles_too() -> None:
    whole, tiled = (planned(row_tiles=rows, **WIDE) for rows in (0, 128))
    sizes = [model.assembly.memory.arenas["evaluate"].arena_bytes for model in (whole, tiled)]
    assert sizes[0] > sizes[1]


def test_tiles_of_all_rows_are_none() -> None:
    kinds = [
        [op.kind for op in planned(row_tiles=rows).assembly.programs["micro_first"].ops] for rows in (0, 512, 1024)
    ]
    assert kinds[0] == kinds[1] == kinds[2]


# ------------------------------------------------------------------------------------------------------ verify, places


def by_rows(*spans: tuple[int, int], reads: tuple[int, int] | None = None) -> Program:
    """h [4, 6] written in rows (first, count), then read: whole, or the rows `reads`."""
    b = Builder(OPS, "fp32")
    x, w = b.input("x", (4, 6), "fp32"), b.param("w", (6, 6), INIT)
    h = b.activation("h", (4, 6), "fp32")
    with b.record("forward"):
        for first, count in spans:
            b.emit("linear", b.rows(x, first, count), w, outs=[b.rows(h, first, count)])
        out = b.apply("linear", b.rows(h, *reads) if reads else h, w)
        return b.program("rows", (out,))


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        (by_rows((0, 2), (2, 2)), ""),
        (by_rows((2, 2), (0, 1), (1, 1)), ""),
        (by_rows((0, 2), reads=(0, 2)), ""),
        (by_rows((0, 1), (1, 2), reads=(0, 3)), ""),
        (by_rows((0, 2), (3, 1)), "reads h:fp32[4,6] before any op writes it"),
        (by_rows((0, 2), reads=(1, 2)), "reads h[1:3]:fp32[2,6] before any op writes it"),
        (by_rows((0, 2), (1, 3)), "writes h[1:4]:fp32[3,6] a second time"),
        (by_rows((0, 4), (1, 1)), "writes h[1:2]:fp32[1,6] a second time"),
        (by_rows((0, 2), (0, 4)), "writes h:fp32[4,6] a second time"),
    ],
)
def test_rows_are_written_once_and_before_they_are_read(program: Program, wrong: str) -> None:
    if wrong:
        with pytest.raises(ProgramError) as error:
            verify(program, OPS)
        assert wrong in str(error.value)
    else:
        verify(program, OPS)


def test_no_op_takes_the_place_of_rows_or_of_a_value_whose_rows_are_read_later() -> None:
    b = Builder(OPS, "fp32")
    x, w = b.input("x", (4, 6), "fp32"), b.param("w", (6, 6), INIT)
    with b.record("forward"):
        base, first = b.apply("linear", x, w), b.apply("linear", x, w)
        total = b.apply("linear_add", x, w, base)
        part = b.apply("linear_add", b.rows(x, 0, 2), w, b.rows(first, 0, 2))
        again = b.apply("linear_add", x, w, first)
        late = b.apply("linear", b.rows(first, 2, 2), w)
        program = in_place(b.program("places", (total, part, again, late)), OPS)
    assert [bool(op.in_place) for op in program.ops if op.kind == "linear_add"] == [True, False, False]
    overwrites = replace(program.ops[4], in_place={0: 2})
    with pytest.raises(ProgramError, match=r"reads first.*overwritten|reads linear#1\[2:4\].*overwritten"):
        verify(replace(program, ops=(*program.ops[:4], overwrites, *program.ops[5:])), OPS)


def test_rows_of_rows_are_rows_of_the_whole() -> None:
    b = Builder(OPS, "fp32")
    with b.record("forward"):
        h = b.activation("h", (8, 6), "bf16")
        rows = b.rows(b.rows(h, 2, 6), 1, 2)
        assert rows is b.rows(h, 3, 2) and rows.root is h and (rows.row, rows.offset) == (3, 36)
        assert b.rows(h, 0, 8) is h
