"""Ops and configurations of Gemma. Parity with transformers, exports and refused keys are tested for all families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp8_model import Model, kinds
from models.harness import MODELS, tiny_config
from torch import Tensor

from surogate_core.testing.ops import check_op
from surogate_core.testing.programs import load_registry
from surogate_models.rope import Linear, Rope
from surogate_models_gemma import reference
from surogate_models_gemma.gemma import rounded
from surogate_models_gemma.ops import OPS

KINDS = {definition.kind: definition for definition in OPS}
GEMMA2: dict[str, Any] = {"model_type": "gemma2", "sliding_window": 6}
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "rope_parameters": None, "sliding_window": 6}


def test_geglu_and_its_gradient_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = 3 * torch.randn(9, 12, generator=generator, dtype=torch.float64)
    dy = torch.randn(9, 6, generator=generator, dtype=torch.float64)

    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return F.gelu(gate, approximate="tanh") * up

    leaf = gate_up.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(exact(leaf), leaf, dy)
    assert torch.allclose(check_op(KINDS["geglu"], gate_up)[0], exact(gate_up), rtol=1e-14)
    assert torch.allclose(check_op(KINDS["geglu_bwd"], dy, gate_up)[0], gradient, rtol=1e-12, atol=1e-14)


def test_the_factor_of_the_embedding_is_rounded_to_its_dtype() -> None:
    """transformers multiplies bf16 embeddings of 3,072 channels by 55.5, not by 55.4256."""
    assert rounded(3072**0.5, "bf16") == 55.5
    for x in (n**0.5 for n in range(1, 5000)):
        for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)):
            assert rounded(x, dtype) == float(torch.tensor(x, dtype=torch.float64).to(torch_dtype))


def test_both_generations_of_config_json_give_the_same_ropes() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    without = {key: item for key, item in tiny_config(**GEMMA3).items() if key != "rope_parameters"}
    for given in (old, new):
        dims = MODELS["gemma3_text"].dims({**without, **given, "sliding_window_pattern": 4})
        assert dims.windows == (6, 6, 6, 0)
        assert [(rope.theta, rope.scaling) for rope in dims.ropes] == [(2e4, None)] * 3 + [(5e5, Linear(8.0))]
        assert dims.max_positions == 128
    assert [rope.theta for rope in MODELS["gemma3_text"].dims(without).ropes] == [1e4] * 4
    assert isinstance(MODELS["gemma2"].dims(tiny_config(**GEMMA2)).ropes[0], Rope)


@pytest.mark.parametrize("fp8", [False, True])
def test_no_pass_drops_what_a_norm_adds_to_its_weight(fp8: bool) -> None:
    """The norms that quantize their result for FP8 have no offset: here the result must be quantized apart."""
    programs = Model(tiny_config(**GEMMA3), fp8=fp8, recompute=frozenset({"block"})).assembly.programs
    norms = [op for op in programs["micro_first"].ops if "norm" in op.kind and "weight" not in op.kind]
    assert {"rmsnorm", "add_rmsnorm", "rmsnorm_bwd", "qk_norm_rope", "qk_norm_rope_bwd"} <= {op.kind for op in norms}
    assert all(op.attrs["offset"] == 1.0 for op in norms), {op.kind for op in norms}


def test_fp8_quantizes_geglu_and_its_gradient_where_they_are_computed() -> None:
    """And the transposed copy for the gradient of the weight is made in the backward pass, of what it reads anyway."""
    model = Model(tiny_config(**GEMMA3))
    found = kinds(model.assembly.programs["micro_first"])
    assert found["fp8_geglu"] == found["fp8_geglu_bwd"] == 4 and not {"geglu", "geglu_bwd"} & found.keys()
    ops = [op for op in model.assembly.programs["micro_first"].ops if "geglu" in op.kind]
    assert {op.attrs.get("hidden", "") for op in ops} == {"", "e4m3"}
    assert not any(op.attrs["transposed"] for op in ops if op.kind == "fp8_geglu")


def test_fp8_rounds_the_bits_of_geglu() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, dy = (3 * torch.randn(32, width, generator=generator).bfloat16() for width in (64, 32))
    scale, attrs = torch.tensor([0.5, 2.0]), {"scaling": "given", "wide": True}
    ops = load_registry().ops
    assert torch.equal(check_op(ops["fp8_geglu"], gate_up, scale, dtype="e4m3", **attrs)[1], reference.geglu(gate_up))
    found = check_op(ops["fp8_geglu_bwd"], dy, gate_up, scale, scale, dtype="e5m2", hidden="e4m3", **attrs)
    assert torch.equal(found[1], reference.geglu_bwd(dy, gate_up))
    assert torch.equal(found[2].float(), (2 * reference.geglu(gate_up)).to(torch.float8_e4m3fn).T.float())
