"""DoRA against PEFT, float32, the same random weights; its ops; its options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.harness import (
    OPS,
    PlannedModel,
    hf_loss_sum,
    packed_documents,
    random_hf_model,
    relative_error,
    tiny_config,
    valid_tokens,
)
from pydantic import ValidationError
from torch import Tensor

from surogate_core.api import Builder, ConfigError, Op, ProgramError, Target
from surogate_core.api.peft import PEFT_CONFIG
from surogate_core.testing.binding import choose
from surogate_core.testing.devices import device
from surogate_core.testing.ops import check_op
from surogate_dora.adapter import DORA
from surogate_dora.kernels import KERNELS, MOST_SLABS, between, slabs
from surogate_dora.ops import OPS as DORA_OPS
from surogate_dora.options import DoraOptions
from surogate_optim_adamw.adamw import AdamWOptions

peft = pytest.importorskip("peft", reason="PEFT is what DoRA is compared with: pip install peft")

TOLERANCE = 1e-5
STEPS, EPSILON = 20, 1e-4
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"dora_rank": 4, "dora_alpha": 8},
    "rslora": {"dora_rank": 4, "dora_alpha": 3, "dora_use_rslora": True},
    "some": {"dora_rank": 3, "dora_target_modules": ["v_proj", "up_proj", "layers.1.self_attn.q_proj"]},
    "one": {"dora_rank": 1, "dora_target_modules": "k_proj"},
}


def planned(options: DoraOptions, model_type: str = "qwen3", **settings: Any) -> PlannedModel:
    config = tiny_config(model_type=model_type)
    return PlannedModel(config, 3, 24, lmhead_chunks=3, adapters=[(DORA, options)], **settings)


def peft_model(options: DoraOptions, model_type: str = "qwen3", *, moved: bool = True) -> Any:
    """PEFT's wrapper of the random model. moved: B and the magnitudes are not those of the start."""
    targets = options.dora_target_modules
    config = peft.LoraConfig(
        r=options.dora_rank,
        lora_alpha=options.dora_alpha,
        use_rslora=options.dora_use_rslora,
        use_dora=True,
        target_modules=ALL if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(random_hf_model(tiny_config(model_type=model_type)), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and moved:
                parameter.normal_(0, 0.1)
            elif "magnitude" in name and moved:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return model


def adapter_of(model: Any, grads: bool = False) -> dict[str, Tensor]:
    """PEFT's tensors, or their gradients, under our param names."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad if grads else p.detach()
        for name, p in model.named_parameters()
        if ".lora_" in name
    }


def filled(model: PlannedModel, theirs: Any, model_type: str = "qwen3") -> PlannedModel:
    model.load(random_hf_model(tiny_config(model_type=model_type)).state_dict())
    adapter = adapter_of(theirs)
    assert {v.name for v in model.assembly.trainable} == adapter.keys()
    for name, tensor in adapter.items():
        model.params[name].copy_(tensor)
    return model


@pytest.mark.parametrize(("case", "model_type"), [*((case, "qwen3") for case in CASES), ("all-linear", "qwen2")])
def test_losses_and_gradients_equal_pefts(case: str, model_type: str) -> None:
    """Qwen2 has biases, which DoRA does not scale."""
    options = DoraOptions(**CASES[case])
    theirs = peft_model(options, model_type)
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    expected = hf_loss_sum(theirs, documents) * scale
    expected.backward()
    model = filled(planned(options, model_type), theirs, model_type)
    assert model.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=TOLERANCE)
    grads = {v.name.removeprefix("grad."): v for v in model.assembly.declared if v.role == "grad"}
    wanted = adapter_of(theirs, grads=True)
    assert grads.keys() == wanted.keys()
    errors = {name: relative_error(model.buffers.persistent(grads[name]), g) for name, g in wanted.items()}
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}


def test_magnitudes_start_as_the_norms_of_rows_and_twenty_steps_are_pefts() -> None:
    """AdamW divides by the root of its second moment: epsilon 1e-4 keeps gradients that are nearly zero from steps of
    full size in either direction."""
    options = DoraOptions(**CASES["all-linear"])
    theirs = peft_model(options, moved=False)
    start = {name: tensor.clone() for name, tensor in adapter_of(theirs).items()}
    model = filled(planned(options, weight_decay=0.1, optimizer_options=AdamWOptions(adamw_epsilon=EPSILON)), theirs)
    for name in start:
        if "magnitude" in name:
            model.params[name].zero_()
    model.executor.run("start_adapter")
    for name, tensor in start.items():
        torch.testing.assert_close(model.params[name], tensor, rtol=1e-6, atol=0)
    model.executor.run("start")
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    groups = [  # vectors do not decay
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    used = AdamWOptions()
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=EPSILON, betas=(used.adamw_beta1, used.adamw_beta2))
    frozen = model.params.keys() - {v.name for v in model.assembly.trainable}
    before = {name: model.params[name].clone() for name in frozen}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        expected = hf_loss_sum(theirs, documents) * scale
        expected.backward()
        optimizer.step()
        assert model.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=TOLERANCE)
        model.update(step, lr=1e-2)
    errors = {name: relative_error(model.params[name], tensor) for name, tensor in adapter_of(theirs).items()}
    assert max(errors.values()) <= 10 * TOLERANCE, errors
    assert all(torch.equal(model.params[name], before[name]) for name in frozen)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "wrong",
    [
        {"dora_rank": 0},
        {"dora_alpha": 0},
        {"dora_alpha": float("nan")},
        {"dora_target_modules": []},
        {"dora_target_modules": [" "]},
        {"dora_dropout": 0.1},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DoraOptions(**wrong)


def test_unknown_targets_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"dora_target_modules: 'query' is no linear .* q_proj, k_proj, .* down_proj"):
        planned(DoraOptions(dora_target_modules=("q_proj", "query")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": "all"}, "bias is 'all', which is not built"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not built"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is .* which is not built"),
        ({"use_dora": False}, "use_dora is False, expected True"),
        ({"r": 5}, "r is 5, but dora_rank is 4. Set dora_rank to the first"),
    ],
)
def test_adapters_of_peft_that_mean_something_else_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    peft_model(DoraOptions(**CASES["all-linear"])).save_pretrained(tmp_path)
    config = json.loads((tmp_path / PEFT_CONFIG).read_text())
    options = DoraOptions(**CASES["all-linear"])
    assert len(DORA.load(tmp_path, options)) == 4 * 7 * 3
    (tmp_path / PEFT_CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        DORA.load(tmp_path, options)


# ----------------------------------------------------------------------------------------------------------------- ops

PLACES = ((1, 3), (4, 2))
OF_DORA = {definition.kind: definition for definition in DORA_OPS}
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def inside(first: int, count: int) -> slice:
    return slice(first, first + count)


@FLOATS
def test_columns_outside_of_projections_are_left_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    h, bias = torch.randn(5, 7).to(dtype), torch.randn(7).to(dtype)
    norm, magnitudes = torch.rand(7) + 0.5, [torch.randn(3), torch.randn(2)]
    (y,) = check_op(OF_DORA["dora_scale"], h, norm, *magnitudes, bias, places=PLACES)
    factor = torch.ones(7)
    for place, magnitude in zip(PLACES, magnitudes, strict=True):
        factor[inside(*place)] = magnitude / norm[inside(*place)]
    assert y.dtype == dtype
    torch.testing.assert_close(y, (factor * h.float() + bias.float()).to(dtype))


def test_gradients_are_those_of_autograd_with_the_norm_as_a_constant() -> None:
    torch.manual_seed(0)
    h, norm, magnitudes = torch.randn(5, 7), torch.rand(7) + 0.5, [torch.randn(3), torch.randn(2)]
    leaves = [tensor.double().requires_grad_() for tensor in (h, *magnitudes)]
    factor = torch.ones(7, dtype=torch.float64)
    for place, magnitude in zip(PLACES, leaves[1:], strict=True):
        factor[inside(*place)] = magnitude / norm[inside(*place)].double()
    dy = torch.randn(5, 7)
    expected = torch.autograd.grad((factor * leaves[0]), leaves, dy.double())
    found = check_op(OF_DORA["dora_scale_bwd"], dy, h, norm, *magnitudes, places=PLACES)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float())


@FLOATS
def test_matrices_are_packed_at_their_places_and_gradients_taken_from_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in ((2, 4), (3, 2), (1, 4), (2, 1))]
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    given = {"places": PLACES, "scale": 0.5}
    down, up = check_op(OF_DORA["dora_pack"], *matrices, rows=7, dtype=name, **given)
    expected = torch.zeros(7, 3)
    expected[1:4, :2], expected[4:6, 2:] = 0.5 * matrices[1], 0.5 * matrices[3]
    assert torch.equal(down, torch.cat(matrices[::2]).to(dtype)) and torch.equal(up, expected.to(dtype))
    found = check_op(OF_DORA["dora_unpack"], down, up, ranks=(2, 1), dtypes=(name,) * 4, **given)
    for ours, matrix, factor in zip(found, matrices, (1, 0.25, 1, 0.25), strict=True):
        torch.testing.assert_close(ours, (factor * matrix).to(dtype))


@FLOATS
def test_norms_are_of_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, down, up = (torch.randn(shape).to(dtype) for shape in ((7, 4), (3, 4), (7, 3)))
    (norm,) = check_op(OF_DORA["dora_norm"], weight, down, up)
    total = weight.double() + up.double() @ down.double()
    torch.testing.assert_close(norm, total.pow(2).sum(1).sqrt().float())
    magnitudes = check_op(OF_DORA["dora_magnitude"], weight, places=PLACES, dtype="fp32")
    for magnitude, place in zip(magnitudes, PLACES, strict=True):
        torch.testing.assert_close(magnitude, weight[inside(*place)].double().pow(2).sum(1).sqrt().float())


@pytest.mark.parametrize(
    ("places", "message"),
    [(((0, 8),), "are no rows of 7"), (((3, 2), (4, 1)), "in their order"), (((0, 0),), "are no rows")],
)
def test_places_that_overlap_or_stick_out_are_refused(places: tuple[tuple[int, int], ...], message: str) -> None:
    b = Builder(OPS, "fp32")
    with pytest.raises(ProgramError, match=message):
        b.emit("dora_magnitude", b.activation("w", (7, 4), "fp32"), places=places, dtype="fp32")


def test_shapes_that_do_not_fit_are_refused() -> None:
    b = Builder(OPS, "fp32")
    shapes = {"h": (5, 7), "a": (2, 7), "b": (3, 2), "n": (7,), "m": (3,)}
    h, a, up, n, m = (b.activation(name, shape, "fp32") for name, shape in shapes.items())
    places = ((0, 3),)
    packed = {"rows": 7, "places": places, "scale": 1.0, "dtype": "fp32"}
    for message, kind, ins, attrs in (
        ("is no bias of", "dora_scale", (h, n, m, m), {"places": places}),
        ("are not of h", "dora_scale", (h, n, n), {"places": places}),
        ("are not of h", "dora_scale", (h, m, m), {"places": places}),
        ("is no gradient of", "dora_scale_bwd", (a, h, n, m), {"places": places}),
        (r"are no A \[R, K\] and B \[N, R\]", "dora_norm", (h, a, up), {}),
        ("1 matrices for 1 places", "dora_pack", (a,), packed),
        (r"are no A \[r, 7\] and B \[3, r\]", "dora_pack", (a, a), packed),
        ("are not of ranks", "dora_unpack", (a, up), {**packed, "ranks": (3,), "dtypes": ("fp32",) * 2}),
    ):
        given = {name: value for name, value in attrs.items() if kind != "dora_unpack" or name not in ("rows", "dtype")}
        with pytest.raises(ProgramError, match=message):
            b.emit(kind, *ins, **given)


# ------------------------------------------------------------------------------------------------------------- kernels


def op_of(kind: str, ins: Sequence[tuple[tuple[int, ...], str]], **attrs: Any) -> Op:
    """An op on values of these shapes and dtypes, with the outputs that its shape rule says."""
    b = Builder(OPS, "fp32")
    with b.record("forward") as ops:
        b.emit(kind, *(b.activation(f"v{i}", shape, dtype) for i, (shape, dtype) in enumerate(ins)), **attrs)
    return ops[0]


def test_kernels_serve_gpus_from_sm80_on_and_say_what_they_do_not_serve() -> None:
    h, n, m = ((5, 7), "bf16"), ((7,), "fp32"), ((7,), "fp32")
    places = ((0, 7),)
    scale = op_of("dora_scale", [h, n, m], places=places)
    back = op_of("dora_scale_bwd", [h, h, n, m], places=places)
    a100 = Target(device("a100"))
    for op in (scale, back, back.changed(accumulate=frozenset({1}))):
        assert choose(KERNELS, op, a100).op == op.kind
    norm = op_of("dora_norm", [((7, 4), "bf16"), ((1025, 4), "bf16"), ((7, 1025), "bf16")])
    mixed = op_of("dora_norm", [((7, 4), "bf16"), ((2, 4), "bf16"), ((7, 2), "fp32")])
    whole = op_of("dora_scale", [((5, 7), "fp64"), n, m], places=places)
    for op, target, message in (
        (scale, Target(replace(device("a100"), sm=75)), "needs a GPU of SM80"),
        (scale.changed(accumulate=frozenset({0})), a100, "cannot accumulate"),
        (back.changed(accumulate=frozenset({0})), a100, "cannot accumulate into d_h"),
        (norm, a100, "at most 1024 ranks in all, got 1025"),
        (mixed, a100, "A and B must be alike"),
        (whole, a100, "operands must be fp32 or bf16"),
    ):
        with pytest.raises(AssertionError, match=message):
            choose(KERNELS, op, target)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 4096, 8191, 8193, 100_000])
def test_every_slab_of_rows_has_rows(rows: int) -> None:
    count = slabs(rows)
    each = -(-rows // count)
    assert 1 <= count <= MOST_SLABS and (count - 1) * each < rows <= count * each


def test_what_lies_between_places_is_found() -> None:
    assert [*between(((1, 2), (3, 1), (6, 1)), 9)] == [(0, 1), (4, 2), (7, 2)]
    assert [*between(((0, 9),), 9)] == []
