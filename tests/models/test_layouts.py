"""Checkpoints that hold the elements of weights in another order: read, written, refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate.checkpoints.checked_form import CheckedForm
from surogate.checkpoints.hf import ModelExport, save_model
from surogate.checkpoints.matrix_codec import MatrixCodec, matrices_in
from surogate.checkpoints.quantize import _form as quantized_form
from surogate.checkpoints.quantized_base import BaseFormat, quantized_params
from surogate.checkpoints.saved_run import SavedRun
from surogate.checkpoints.stored_weights import open_weights
from surogate_core.api import ConfigError, HFTensor, ProgramError, Sharding, WeightMap
from surogate_core.assembly.assemble import assemble, record
from surogate_core.runtime.pieces import Pieces
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_models.api import Interleaved, Stacked, Transposed, decoder, pre_norm, pre_norm_weights
from surogate_models.llama import dims
from surogate_qlora_nf4.format import NF4
from surogate_qlora_nf4.options import Nf4Options
from surogate_verify.surogate_side import _gradients as verified_gradients

from .harness import OPS, PlannedModel, plan_inputs, tiny_config

CONFIG = tiny_config(model_type="llama", num_key_value_heads=4, num_hidden_layers=1)
LAYER = "model.layers.0"
GATE_UP, QKV, DOWN = f"{LAYER}.mlp.gate_up.weight", f"{LAYER}.self_attn.qkv.weight", f"{LAYER}.mlp.down_proj.weight"


def moved_weights(d: Any, name: str, source: str) -> list[WeightMap]:
    """The maps of a Llama whose checkpoint has gate and up row by row, q, k and v head by head, and down transposed."""
    fused = {
        f"{name}.mlp.gate_up": HFTensor(GATE_UP, (2 * d.d_ff, d.d_model), Interleaved(2)),
        f"{name}.attn.qkv": HFTensor(QKV, (3 * d.q_rows, d.d_model), Interleaved(3, rows=d.head_dim)),
        f"{name}.mlp.down": HFTensor(DOWN, (d.d_ff, d.d_model), Transposed()),
    }
    maps = pre_norm_weights(d, name, source)
    return [WeightMap(m.param, (fused[m.param],)) if m.param in fused else m for m in maps]


MOVED = decoder(
    name="moved",
    summary="a Llama with its weights in another order",
    architecture="MovedForCausalLM",
    dims=dims,
    block=pre_norm,
    block_weights=moved_weights,
)
DIMS = dims(CONFIG)
MAPS = MOVED.weights(DIMS)


def stored() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {t.name: torch.randn(t.shape) for m in MAPS for t in m.tensors}


def divided(tensor: Tensor) -> Pieces:
    """The tensor in two pieces, cut inside of a row, as two ranks of a process hold it."""
    flat = tensor.view(-1)
    cut = flat.numel() // 2 + 3
    return Pieces(tuple(tensor.shape), 0, [flat[:cut], flat[cut:]])


@pytest.mark.parametrize("held", [Pieces.of, divided])
def test_elements_are_where_the_layout_says_and_export_is_the_input_byte_for_byte(held: Any, tmp_path: Path) -> None:
    given = stored()
    save_file(given, tmp_path / "model.safetensors", metadata={"format": "pt"})
    params = {v.name: torch.empty(v.shape) for v in assemble(plan_inputs(CONFIG, model=MOVED)).params.values()}
    pieces = {name: held(param) for name, param in params.items()}
    open_weights(tmp_path, MAPS).load(pieces)
    f, head = DIMS.d_ff, DIMS.head_dim
    assert torch.equal(params["layers.0.mlp.gate_up"][f + 5], given[GATE_UP][2 * 5 + 1])
    value_of_head_2 = given[QKV].view(-1, 3, head, DIMS.d_model)[2, 2]
    assert torch.equal(params["layers.0.attn.qkv"][2 * DIMS.q_rows + 2 * head :][:head], value_of_head_2)
    assert torch.equal(params["layers.0.mlp.down"], given[DOWN].T)
    export = ModelExport(weights=MAPS, params=pieces, config=CONFIG, source_dir=None, dtype="fp32")
    save_model(tmp_path / "out", export)
    written = tmp_path / "out/model.safetensors"
    assert written.stat().st_size > 4 * sum(map(prod, (t.shape for t in given.values())))
    assert {name: t.numpy().tobytes() for name, t in load_file(written).items()} == {
        name: t.numpy().tobytes() for name, t in given.items()
    }


def test_a_range_of_rows_is_read_of_a_tensor_in_another_order(tmp_path: Path) -> None:
    """As a rank of another process reads its part."""
    given = stored()
    save_file(given, tmp_path / "model.safetensors")
    part = torch.empty(100)
    open_weights(tmp_path, MAPS).load({"layers.0.mlp.down": Pieces((DIMS.d_model, DIMS.d_ff), 85, [part])})
    assert torch.equal(part, given[DOWN].T.reshape(-1)[85:185])


def test_the_model_computes_what_it_computes_with_weights_in_order() -> None:
    given = stored()
    plain, moved = PlannedModel(CONFIG, 1, 24), PlannedModel(CONFIG, 1, 24, model=MOVED)
    moved.load(given)
    for name, param in plain.params.items():
        param.copy_(moved.params[name])
    rows = [[[*range(20)]]]
    assert moved.micro_step(rows, 0.1) == plain.micro_step(rows, 0.1)
    theirs: Mapping[str, Tensor] = plain.gradients
    compared = verified_gradients(moved.assembly, moved.buffers.persistent)
    assert all(torch.equal(compared[name], gradient) for name, gradient in moved.gradients.items())
    assert torch.equal(moved.gradients[DOWN], theirs[DOWN].T)
    assert torch.equal(moved.gradients[GATE_UP][1::2], theirs[f"{LAYER}.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (HFTensor(GATE_UP, (159, 48), Interleaved(2)), r"mlp.gate_up.weight \[159, 48\]: its rows must be a multiple"),
        (HFTensor(GATE_UP, (160,), Transposed()), r"mlp.gate_up.weight \[160\]: a tensor needs two dimensions"),
        (HFTensor(GATE_UP, (160, 48), Transposed()), r"layers.0.mlp.gate_up is \[160, 48\], .* make \[48, 160\]"),
    ],
    ids=str,
)
def test_a_tensor_that_cannot_have_its_layout_is_refused_by_name(tensor: HFTensor, message: str) -> None:
    maps = [WeightMap(m.param, (tensor,)) if m.param == "layers.0.mlp.gate_up" else m for m in MAPS]
    with pytest.raises(ProgramError, match=message):
        record(plan_inputs(CONFIG, model=replace(MOVED, weights=lambda d: maps)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "(gate_up|qkv).weight is interleaved"),
        ({"lora_target_modules": ["o_proj"]}, ""),
        (
            {"lora_target_modules": ["o_proj"], "lora_modules_to_save": ["model.norm"]},
            "model.norm.weight is interleaved",
        ),
    ],
    ids=str,
)
def test_an_adapter_of_a_weight_in_another_order_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    norm = WeightMap("norm", (HFTensor("model.norm.weight", (48,), Interleaved(2)),))
    maps = [norm if m.param == "norm" else m for m in MAPS]
    model = replace(MOVED, weights=lambda d: maps)
    inputs = plan_inputs(CONFIG, model=model, adapters=((LORA, LoraOptions(**options)),))
    if not named:
        assert record(inputs).stored is not None
        return
    with pytest.raises(ConfigError, match=f"adapter lora: .*{named}"):
        record(inputs)


def test_a_weight_format_rounds_the_rows_of_the_param(tmp_path: Path) -> None:
    codec = MatrixCodec(NF4, Nf4Options(), OPS, "fp32")
    tensor, weight = HFTensor(DOWN, (128, 64), Transposed()), torch.randn(128, 64)
    (held,), (plain,) = (matrices_in(WeightMap("down", (t,))) for t in (tensor, HFTensor(DOWN, (64, 128))))
    assert torch.equal(codec.rounded(held, weight).T, codec.rounded(plain, weight.T.contiguous()))
    save_file({DOWN: torch.zeros(4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    assert NF4.checkpoints is not None
    form = CheckedForm(NF4, NF4.checkpoints, Nf4Options())
    base = BaseFormat(form, frozenset({"layers.0.mlp.down"}), {})
    with pytest.raises(ConfigError, match=rf"{DOWN} is stored quantized and transposed"):
        quantized_params({tmp_path / "model.safetensors": {DOWN}}, MAPS, base)


def test_a_quantized_checkpoint_with_a_weight_in_another_order_is_not_written(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(model_dir=tmp_path, model_config={}, config=SimpleNamespace(quantize_embedding=False))
    codec = MatrixCodec(NF4, Nf4Options(), OPS, "fp32")
    with pytest.raises(ConfigError, match=f"{DOWN} is transposed, a layout without `leading`, which no weight format"):
        quantized_form(run, codec, [held for m in MAPS for held in matrices_in(m) if held.tensor.name == DOWN])
    stack = HFTensor("x", (5, 4, 6), Stacked(6, Transposed()))
    quantized_form(run, codec, matrices_in(WeightMap("x", (stack,), matrices=5)))
    with pytest.raises(ConfigError, match="x is a stack of matrices, each transposed, of one matrix, which no weight"):
        quantized_form(run, codec, matrices_in(WeightMap("x", (stack,))))


def test_several_processes_do_not_divide_a_weight_in_another_order() -> None:
    sharding = Sharding(parts=2, states=True, gradients=True, weights=True)
    inputs = plan_inputs(CONFIG, model=MOVED, world_size=2, sharding=sharding)
    run: Any = SimpleNamespace(adapter=None)
    plan: Any = SimpleNamespace(assembly=assemble(inputs))
    saved = SavedRun(run=run, plan=plan, facts={}, extends=lambda n: False, versions={}, metrics=Path("none"))
    saved.refuse_ranges(1)
    with pytest.raises(ConfigError, match=r"(gate_up|qkv).weight is interleaved .* shard_weights: false"):
        saved.refuse_ranges(2)
