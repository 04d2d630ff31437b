"""References of the ops `qk_norm_rope` and `rope`, and their backward rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.harness import plan_inputs, tiny_config
from torch import Tensor
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from surogate_core.api import Op
from surogate_core.assembly.assemble import assemble
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_models.kernels import KERNELS
from surogate_models.ops import OPS
from surogate_models.reference import qk_norm_rope, qk_norm_rope_bwd, query_factors, rope, rope_bwd
from surogate_models.rope import Linear, QueryScaling, Rope

ATTRS: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "theta": 100.0, "eps": 1e-5, "offset": 0.5}
ROPE_ATTRS = {k: v for k, v in ATTRS.items() if k not in ("eps", "offset")} | {
    "scaling": Linear(3.0),
    "attention_factor": 1.25,
}
POSITIONS = torch.tensor([0, 1, 2, 0, 7], dtype=torch.int32)
Q_WIDTH, K_WIDTH = 24, 12


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 48, dtype=dtype, generator=generator)
    q_norm, k_norm = 1 + 0.3 * torch.randn(2, 6, dtype=dtype, generator=generator)
    return qkv, q_norm, k_norm


def test_backward_equals_finite_differences() -> None:
    """Central differences in fp64 have an error of about h^2 = 1e-10 times the third derivative."""
    operands = inputs(torch.float64)
    dy = torch.randn(5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h = 1e-5
    gradients = qk_norm_rope_bwd(dy, *operands, POSITIONS, **ATTRS)
    for which, gradient in enumerate(gradients):
        numeric = torch.empty_like(gradient)
        for i in range(gradient.numel()):
            values = []
            for sign in (h, -h):
                moved = [x.clone() for x in operands]
                moved[which].view(-1)[i] += sign
                values.append((qk_norm_rope(*moved, POSITIONS, **ATTRS) * dy).sum())
            numeric.view(-1)[i] = (values[0] - values[1]) / (2 * h)
        assert torch.allclose(gradient, numeric, rtol=1e-7, atol=1e-8)


def test_backward_equals_autograd_through_the_reference() -> None:
    operands = [x.requires_grad_() for x in inputs(torch.float64)]
    dy = torch.randn(5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(qk_norm_rope(*operands, POSITIONS, **ATTRS), operands, dy)
    with torch.no_grad():
        gradients = qk_norm_rope_bwd(dy, *operands, POSITIONS, **ATTRS)
    for gradient, autograd in zip(gradients, expected, strict=True):
        assert torch.allclose(gradient, autograd, rtol=1e-12, atol=1e-13)


def test_v_is_copied_and_rotation_preserves_the_norm_of_a_head() -> None:
    qkv, _, _ = inputs(torch.float64)
    rest = torch.full((6,), 1 - ATTRS["offset"], dtype=torch.float64)
    out = qk_norm_rope(qkv, rest, rest, POSITIONS, **ATTRS)
    assert torch.equal(out[:, Q_WIDTH + K_WIDTH :], qkv[:, Q_WIDTH + K_WIDTH :])
    heads = out[:, : Q_WIDTH + K_WIDTH].view(5, 6, 6)
    assert torch.allclose(heads.square().mean(-1), torch.ones(5, 6, dtype=torch.float64), atol=1e-4)


def test_scores_depend_only_on_the_distance_of_positions() -> None:
    """Angles are fp32, which limits the accuracy."""
    qkv, q_norm, k_norm = inputs(torch.float64)
    near, far = (qk_norm_rope(qkv, q_norm, k_norm, POSITIONS + shift, **ATTRS) for shift in (0, 11))
    scores = [(x[:, :6] @ x[:, Q_WIDTH : Q_WIDTH + 6].T)[:3, :3] for x in (near, far)]
    assert torch.allclose(*scores, atol=1e-5)


def test_bf16_rounds_the_fp32_result_once() -> None:
    operands = [x.bfloat16() for x in inputs(torch.float32)]
    wide = qk_norm_rope(*(x.float() for x in operands), POSITIONS, **ATTRS)
    assert torch.equal(qk_norm_rope(*operands, POSITIONS, **ATTRS), wide.bfloat16())


def test_rope_is_qk_norm_rope_without_the_norm() -> None:
    """With normalized heads and norm weights of 1, the norm is the identity."""
    x = inputs(torch.float64)[0].view(5, 8, 6)
    qkv = (x / x.square().mean(-1, keepdim=True).sqrt()).view(5, 48)
    ones = torch.ones(6, dtype=torch.float64)
    normed = qk_norm_rope(qkv, ones, ones, POSITIONS, **ROPE_ATTRS, eps=0.0)
    assert torch.allclose(rope(qkv, POSITIONS, **ROPE_ATTRS), normed, rtol=1e-12, atol=1e-13)


def test_backward_of_rope_equals_autograd_through_the_reference() -> None:
    qkv = inputs(torch.float64)[0].requires_grad_()
    dy = torch.randn(5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(rope(qkv, POSITIONS, **ROPE_ATTRS), qkv, dy)
    assert torch.allclose(rope_bwd(dy, POSITIONS, **ROPE_ATTRS), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", [rope, rope_bwd])
def test_partial_rope_rotates_the_first_elements_of_a_head_as_if_they_were_the_head(function: Any) -> None:
    qkv = inputs(torch.float64)[0]
    out = function(qkv, POSITIONS, **ROPE_ATTRS, rotary_dim=4).view(5, 8, 6)
    first = function(qkv.view(5, 8, 6)[..., :4].reshape(5, 32), POSITIONS, **ROPE_ATTRS | {"head_dim": 4})
    assert torch.equal(out[..., :4].reshape(5, 32), first)
    assert torch.equal(out[..., 4:], qkv.view(5, 8, 6)[..., 4:])


def test_the_attention_factor_multiplies_queries_and_keys_only() -> None:
    qkv = inputs(torch.float64)[0]
    once, twice = (rope(qkv, POSITIONS, **ROPE_ATTRS | {"attention_factor": f}) for f in (1.0, 2.0))
    assert torch.equal(twice[:, : Q_WIDTH + K_WIDTH], 2 * once[:, : Q_WIDTH + K_WIDTH])
    assert torch.equal(twice[:, Q_WIDTH + K_WIDTH :], qkv[:, Q_WIDTH + K_WIDTH :])


@pytest.mark.parametrize("scaling", [QueryScaling(0.1, 16384), QueryScaling(0.37, 3), QueryScaling(2.5, 1)], ids=str)
def test_the_factors_of_queries_have_the_bits_of_transformers(scaling: QueryScaling) -> None:
    """At every position around the first multiples of the length, and at some of the longest context."""
    near = torch.arange(4)[:, None] * scaling.length + torch.arange(-2, 3)
    positions = torch.cat((near.flatten(), torch.tensor([262143, 262144, 999999]))).clamp(min=0)
    theirs = get_llama_4_attn_scale(positions[None], scaling.beta, scaling.length)
    assert torch.equal(query_factors(positions.to(torch.int32), scaling).flatten(), theirs.flatten())


@pytest.mark.parametrize("rotary_dim", [0, 4])
@pytest.mark.parametrize("function", [rope, rope_bwd])
def test_query_scaling_multiplies_whole_query_heads_from_its_length_on(function: Any, rotary_dim: int) -> None:
    qkv, positions = inputs(torch.float64)[0], torch.tensor([0, 2, 3, 8, 9], dtype=torch.int32)
    attrs = ROPE_ATTRS | {"rotary_dim": rotary_dim}
    scaled = function(qkv, positions, **attrs, query_scaling=QueryScaling(0.5, 3))
    plain = function(qkv, positions, **attrs)
    passed = torch.tensor([0, 0, 1, 2, 3], dtype=torch.float64)[:, None]
    factors = 1 + 0.5 * torch.log1p(passed)
    assert torch.allclose(scaled[:, :Q_WIDTH], plain[:, :Q_WIDTH] * factors, rtol=2**-22, atol=0)  # factors are fp32
    assert torch.equal(scaled[:2], plain[:2])
    assert torch.equal(scaled[:, Q_WIDTH:], plain[:, Q_WIDTH:])


def test_backward_of_scaled_queries_equals_autograd_and_finite_differences() -> None:
    """The op is linear, so that central differences have no error but that of rounding, 2^-53 / h."""
    attrs = ROPE_ATTRS | {"query_scaling": QueryScaling(0.5, 3)}
    qkv = inputs(torch.float64)[0].requires_grad_()
    dy = torch.randn(5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(rope(qkv, POSITIONS, **attrs), qkv, dy)
    gradient = rope_bwd(dy, POSITIONS, **attrs)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-13)
    qkv = qkv.detach()
    for i in range(0, qkv.numel(), 7):
        up, down = (qkv.clone() for _ in range(2))
        up.view(-1)[i] += 0.5
        down.view(-1)[i] -= 0.5
        slope = ((rope(up, POSITIONS, **attrs) - rope(down, POSITIONS, **attrs)) * dy).sum()
        assert torch.allclose(gradient.view(-1)[i], slope, rtol=1e-10, atol=1e-12)


def test_bf16_rounds_the_scaled_queries_once() -> None:
    attrs = ROPE_ATTRS | {"query_scaling": QueryScaling(0.37, 2)}
    qkv = inputs(torch.float32)[0].bfloat16()
    assert torch.equal(rope(qkv, POSITIONS, **attrs), rope(qkv.float(), POSITIONS, **attrs).bfloat16())


@pytest.mark.parametrize("kind", ["rope", "rope_bwd"])
def test_the_kernels_of_rope_scale_queries_and_one_without_the_attribute_is_not_asked_to(kind: str) -> None:
    definition = next(each for each in OPS if each.kind == kind)
    scaled = Op(kind, (), (), ROPE_ATTRS | {"query_scaling": QueryScaling(0.1, 8)})
    kernels = [kernel for kernel in KERNELS if kernel.op == kind]
    assert len(kernels) == 2 and not any(definition.not_implemented(scaled, kernel.attrs) for kernel in kernels)
    assert "query_scaling" in str(definition.not_implemented(scaled, ("scaling", "attention_factor", "rotary_dim")))


def test_rows_that_reach_no_scaled_position_have_no_attribute_for_it() -> None:
    scaled = Rope(1e4, query_scaling=QueryScaling(0.1, 32))
    assert "query_scaling" not in scaled.of_rows(32).attrs
    assert scaled.of_rows(33).attrs["query_scaling"] == QueryScaling(0.1, 32)


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        ([(5, 47), (6,), (6,), (5,)], {}, "48 columns"),
        ([(5, 48), (5,), (6,), (5,)], {}, r"shape \[6\]"),
        ([(5, 48), (6,), (6,), (4,)], {}, r"int32 \[5\]"),
        ([(5, 40), (5,), (5,), (5,)], {"head_dim": 5}, "even"),
    ],
)
def test_mismatched_shapes_are_rejected(shapes: list[tuple[int, ...]], attrs: dict[str, int], message: str) -> None:
    b = Builder({definition.kind: definition for definition in OPS}, "fp32")
    qkv, q_norm, k_norm = (b.input(f"in{i}", shape, "fp32") for i, shape in enumerate(shapes[:3]))
    positions = b.input("positions", shapes[3], "int32")
    with pytest.raises(ProgramError, match=message):
        b.emit("qk_norm_rope", qkv, q_norm, k_norm, positions, **(ATTRS | attrs))


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        ([(5, 47), (5,)], {}, "48 columns"),
        ([(5, 48), (4,)], {}, r"int32 \[5\]"),
        ([(5, 40), (5,)], {"head_dim": 5}, "even"),
        ([(5, 48), (5,)], {"rotary_dim": 8}, "rotary_dim must be even and at most head_dim 6"),
        ([(5, 48), (5,)], {"query_scaling": QueryScaling(0.1, 0)}, "length of at least 1, got QueryScaling"),
    ],
)
def test_mismatched_shapes_of_rope_are_rejected(
    shapes: list[tuple[int, ...]], attrs: dict[str, Any], message: str
) -> None:
    b = Builder({definition.kind: definition for definition in OPS}, "fp32")
    qkv, positions = b.input("qkv", shapes[0], "fp32"), b.input("positions", shapes[1], "int32")
    with pytest.raises(ProgramError, match=message):
        b.emit("rope", qkv, positions, **(ROPE_ATTRS | attrs))


def test_queries_keys_and_values_of_other_shapes_are_not_joined_or_split() -> None:
    b = Builder({definition.kind: definition for definition in OPS}, "fp32")
    q, k, v = (b.input(f"in{i}", (5, n), "fp32") for i, n in enumerate((8, 4, 2)))
    qkv = b.apply("join_qkv", q, k, v)
    assert [part.shape for part in b.emit("split_qkv", qkv, widths=(8, 4, 2))] == [(5, 8), (5, 4), (5, 2)]
    with pytest.raises(ProgramError, match="matrices of one dtype with as many rows"):
        b.emit("join_qkv", q, k, b.input("wide", (5, 2), "bf16"))
    with pytest.raises(ProgramError, match=r"widths \(8, 4, 4\) must be three and make up the columns"):
        b.emit("split_qkv", qkv, widths=(8, 4, 4))


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_the_result_takes_the_place_of_qkv_where_nothing_reads_qkv_again(model_type: str) -> None:
    """The backward pass of the norms of queries and keys reads it again, that of RoPE alone does not."""
    programs = assemble(plan_inputs(tiny_config(model_type=model_type))).programs
    marked = {name: {op.kind for op in programs[name].ops if op.in_place} for name in ("evaluate", "micro_first")}
    if model_type == "qwen3":
        assert marked == {"evaluate": {"qk_norm_rope"}, "micro_first": {"qk_norm_rope_bwd", "swiglu_bwd"}}
    else:
        assert marked == {"evaluate": {"rope"}, "micro_first": {"rope", "rope_bwd", "swiglu_bwd"}}
