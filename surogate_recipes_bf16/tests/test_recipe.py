"""The bf16 recipe: supported dtypes, the result of lowering, and training with every mixture of dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from models.harness import OPS, PlannedModel, random_documents, tiny_config, valid_tokens
from torch import Tensor

from surogate_core.api import DeviceInfo, NoOptions, Op, Precision, PrecisionRequest, Program
from surogate_core.testing.devices import DEVICES
from surogate_core.testing.programs import initialize, verify
from surogate_recipes_bf16.recipe import BF16

UNIT = 2.0**-9
"""Largest relative error of rounding to bf16."""

LAYERS = 2
PRODUCTS = {"linear", "linear_dgrad", "linear_wgrad", "linear_bgrad", "lm_head_ce", "lm_head_ce_grads"}
STATISTICS = {"rstd", "lse"}

CONFIG = tiny_config(
    vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=LAYERS, head_dim=8, attention_bias=True
)
ROWS = [[document] for document in random_documents([16, 11], CONFIG["vocab_size"])]
SCALE = 1 / valid_tokens([document for row in ROWS for document in row])


def decide(**request: str | None) -> Precision:
    return BF16.precision(PrecisionRequest(**request), NoOptions())


# --------------------------------------------------------------------------------------------------------- precision


def test_default_dtypes_are_bf16_with_fp32_gradients_and_states() -> None:
    assert decide() == Precision(
        model="bf16",
        matmul="bf16",
        gradient="bf16",
        master="bf16",
        adapter="fp32",
        param_grad="fp32",
        optimizer_state="fp32",
    )


def test_products_and_masters_default_to_the_model_dtype() -> None:
    decided = decide(model_dtype="fp32")
    assert (decided.matmul, decided.gradient, decided.master) == ("fp32", "fp32", "fp32")
    assert decide(model_dtype="fp32", matmul_dtype="bf16").gradient == "bf16"


@pytest.mark.parametrize("key", ["master", "adapter", "param_grad", "optimizer_state"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_requested_dtypes_are_used(key: str, dtype: str) -> None:
    assert getattr(decide(**{f"{key}_dtype": dtype}), key) == dtype


def test_gpus_before_ampere_are_rejected_with_both_sm_versions() -> None:
    def supported(sm: int | None) -> tuple[bool, str]:
        fields: Mapping[str, Any] = vars(DEVICES["a100"]) | {"sm": sm, "title": "NVIDIA Test"}
        support = BF16.supports(DeviceInfo(**fields), decide(), NoOptions())
        return support.ok, support.reason

    assert supported(None)[0] and supported(80)[0] and supported(120)[0]
    ok, reason = supported(75)
    assert not ok and "SM80" in reason and "SM75" in reason


# ----------------------------------------------------------------------------------------------------------- lowering


MIXTURES = list(product(("fp32", "bf16"), repeat=5))
KEYS = ("model_dtype", "matmul_dtype", "master_dtype", "param_grad_dtype", "optimizer_state_dtype")
PAIRS = list(product(("fp32", "bf16"), repeat=2))


def planned(request: Mapping[str, str], **settings: Any) -> PlannedModel:
    """Return the tiny model with random weights. They are the same for all dtypes, except for rounding."""
    settings = {"max_grad_norm": 1.0, "weight_decay": 0.1} | settings
    model = PlannedModel(CONFIG, 2, 16, request=PrecisionRequest(**request), **settings)
    initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    for name, param in model.params.items():  # not ones and zeros, so that every scale and bias matters
        if param.ndim == 1:
            generator = torch.Generator().manual_seed(len(name))
            param.add_(0.1 * torch.randn(param.shape, generator=generator))
    model.executor.run("start")
    return model


def floats(op: Op) -> Iterator[Any]:
    """Return the operands of a product: matrices and biases, without the loss scale."""
    return (v for v in op.ins if v.dtype in ("fp32", "bf16") and v.shape)


def check_lowered(program: Program, model_dtype: str, matmul_dtype: str) -> None:
    for op in program.ops:
        if op.kind in PRODUCTS:
            assert {v.dtype for v in floats(op)} == {matmul_dtype}, op
        elif op.kind not in ("cast", "accumulate_rounded", "global_norm", "adamw"):
            activations = [v for v in floats(op) if v.role == "act" and v.label not in STATISTICS]
            assert {v.dtype for v in activations} <= {model_dtype}, op
            results = [v for v in op.outs if v.role == "act" and v.label.startswith(("residual", "norm", "d_residual"))]
            assert {v.dtype for v in results} <= {model_dtype}, op


@pytest.mark.parametrize(("model", "matmul"), PAIRS)
def test_products_have_the_matmul_dtype_and_other_ops_the_model_dtype(model: str, matmul: str) -> None:
    assembly = planned({"model_dtype": model, "matmul_dtype": matmul}).assembly
    for name in ("micro_first", "micro_next", "evaluate"):
        program = assembly.programs[name]
        verify(program, OPS)
        assert sum(op.kind in PRODUCTS for op in program.ops) >= 4 * LAYERS + 1
        check_lowered(program, model, matmul)
    assert all(v.dtype == model for v in assembly.params.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_dtype_needs_no_casts(dtype: str) -> None:
    programs = planned({"model_dtype": dtype}).assembly.programs
    assert not [op for program in programs.values() for op in program.ops if op.kind == "cast"]


@pytest.mark.parametrize(("model", "matmul"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_forward_and_backward_share_one_cast_per_value(model: str, matmul: str) -> None:
    assembly = planned({"model_dtype": model, "matmul_dtype": matmul}).assembly
    for name in ("micro_first", "evaluate"):
        casts = Counter((op.ins[0], op.outs[0].dtype) for op in assembly.programs[name].ops if op.kind == "cast")
        assert max(casts.values()) == 1, casts.most_common(1)
    ops = assembly.programs["micro_first"].ops
    weights = {v for v in assembly.params.values() if len(v.shape) == 2 and v.name != "embedding"}
    cast = {op.ins[0]: op.outs[0] for op in ops if op.kind == "cast" and op.ins[0] in weights}
    assert cast.keys() == weights
    for weight in weights - {assembly.params["lm_head"]}:
        assert [op.kind for op in ops if cast[weight] in op.ins] == ["linear", "linear_dgrad"]


def test_results_of_fp32_products_in_a_bf16_model_are_cast_to_bf16() -> None:
    ops = planned({"model_dtype": "bf16", "matmul_dtype": "fp32"}).assembly.programs["micro_first"].ops
    back = {op.ins[0]: op.outs[0] for op in ops if op.kind == "cast" and op.outs[0].dtype == "bf16"}
    activations = [op.outs[0] for op in ops if op.kind in ("linear", "linear_dgrad")]
    assert len(activations) == 8 * LAYERS
    for value in activations:
        assert value.dtype == "fp32" and back[value].dtype == "bf16" and back[value].label == value.label


# ----------------------------------------------------------------------------------------------------------- training


@cache
def exact() -> tuple[float, dict[str, Tensor], float]:
    """Return loss, gradients and the root mean square of the logits, all in fp32."""
    model = planned({"model_dtype": "fp32"})
    loss = model.micro_step(ROWS, SCALE)
    gradients = {name: grad.clone() for name, grad in model.gradients.items()}
    return loss, gradients, float(model.logits(ROWS).square().mean().sqrt())


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
def test_every_mixture_trains_a_step_close_to_fp32(mixture: tuple[str, ...]) -> None:
    """Runs in the planned buffers, with dead values poisoned.

    Loss: a path from embedding to logits has about ten roundings of random sign per block, so logits have a relative
    error of about sqrt(10 L + 5) units, and the loss of a token has at most twice that. Gradients: the backward pass
    doubles the number of roundings. Even an error of 4 x sqrt(2 (10 L + 5)) units gives a cosine above 0.998.
    """
    model = planned(dict(zip(KEYS, mixture, strict=True)))
    before = {name: p.clone() for name, p in model.params.items()}
    loss, gradients, logits = exact()
    roundings = 10 * LAYERS + 5

    assert model.micro_step(ROWS, SCALE) == pytest.approx(loss, abs=2 * roundings**0.5 * UNIT * logits + 1e-6)
    for name, grad in model.gradients.items():
        assert grad.dtype == (torch.bfloat16 if mixture[3] == "bf16" else torch.float32)
        assert cosine(grad, gradients[name]) > 0.99, name

    once = float(model.buffers.persistent(model.assembly.loss))
    assert model.micro_step(ROWS, SCALE, first=False) == pytest.approx(2 * once, rel=1e-6)
    for name, grad in model.gradients.items():  # the same micro-batch twice gives twice the gradient
        assert cosine(grad, gradients[name]) > 0.99, name
        assert float(grad.norm() / gradients[name].norm()) == pytest.approx(2, rel=0.05), name

    model.update(step=1, lr=1e-2)
    for name, param in model.params.items():
        assert param.isfinite().all() and not torch.equal(param, before[name]), name
    assert model.micro_step(ROWS, SCALE) < loss
    trained = float(model.buffers.persistent(model.assembly.loss))
    model.write(ROWS, SCALE)
    model.executor.run("evaluate")
    assert float(model.buffers.persistent(model.assembly.eval_loss)) == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize(("model", "matmul"), PAIRS)
@pytest.mark.parametrize("gradient", ["fp32", "bf16"])
def test_recomputation_is_bit_identical_in_every_mixture(model: str, matmul: str, gradient: str) -> None:
    request = {"model_dtype": model, "matmul_dtype": matmul, "param_grad_dtype": gradient}
    plain = planned(request)
    losses = [plain.micro_step(ROWS, SCALE), plain.micro_step(ROWS, SCALE, first=False)]
    for parts in ({"rmsnorm"}, {"swiglu"}, {"qkv"}, {"att"}, {"ffn"}, {"rmsnorm", "ffn"}, {"block"}):
        other = planned(request, recompute=frozenset(parts))
        program = other.assembly.programs["micro_first"]
        assert any(op.phase == "recompute" or op.kind.endswith("_recompute") for op in program.ops), parts
        check_lowered(program, model, matmul)
        assert [other.micro_step(ROWS, SCALE), other.micro_step(ROWS, SCALE, first=False)] == losses, parts
        for name, grad in other.gradients.items():
            assert torch.equal(grad, plain.gradients[name]), (parts, name)


def test_accumulation_of_bf16_gradients_of_a_model_is_unbiased() -> None:
    """The first micro-step stores the gradient rounded to nearest. Others add theirs to it with stochastic rounding,
    after those of products and the embedding were rounded to nearest too.

    So the expected value is the fp32 sum of these gradients. The error of an addition is less than one unit in the last
    place, with a standard deviation of at most half a unit. Over S seeds and N elements, the mean error exceeds
    5 / 2 sqrt(2 / (S N)) units with a probability of 1 in 2e6.
    """
    exactly, rounded = (planned({"model_dtype": "bf16", "param_grad_dtype": d}) for d in ("fp32", "bf16"))
    rows = [[[document] for document in random_documents([16, 16], CONFIG["vocab_size"], seed=s)] for s in range(3)]
    parts = []
    for batch in rows:
        exactly.micro_step(batch, SCALE)
        parts.append({name: g.clone() for name, g in exactly.gradients.items() if g.ndim == 2})
    seed, micro_step = (
        rounded.buffers.persistent(getattr(rounded.assembly.scalars, name)) for name in ("seed", "micro_step")
    )
    errors = []
    for s in range(20):
        seed.fill_(s)
        for i, batch in enumerate(rows):
            micro_step.fill_(i)
            rounded.micro_step(batch, SCALE, first=i == 0)
        for name, first in parts[0].items():
            exact = name == "lm_head.weight"
            others = [part[name] if exact else part[name].bfloat16().float() for part in parts[1:]]
            expected = first.bfloat16().float() + others[0] + others[1]
            largest = 1.02 * (first.abs() + parts[1][name].abs() + parts[2][name].abs())  # of any rounded partial sum
            unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 8)
            errors.append(((rounded.gradients[name].float() - expected) / unit).flatten())
    error = torch.cat(errors)
    assert error.abs().max() < 2
    assert error.std() > 0.1, "no value was rounded, so the test checks nothing"
    assert abs(error.mean()) < 5 * 0.5 * (2 / error.numel()) ** 0.5
