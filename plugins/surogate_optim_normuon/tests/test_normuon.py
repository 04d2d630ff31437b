"""NorMuon: the specification's vectors, orthogonalization, logical matrices, decay, skipped steps, a small model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from models import harness
from torch import Tensor

from surogate_core.api import Target
from surogate_core.memory.cost import op_cost
from surogate_core.testing.devices import device
from surogate_core.testing.programs import initialize, load_registry
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_optim_normuon.iterations import METHODS
from surogate_optim_normuon.kernels import KERNELS
from surogate_optim_normuon.optimizer import NORMUON, NORMUON_OP, NorMuonOptions, flops, passes, traffic
from surogate_optim_normuon.reference import normuon, orthogonalized
from surogate_optim_normuon.scaling import factor

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CONFIG = harness.tiny_config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=8)
ROWS = [[document] for document in harness.random_documents([16, 11], 61)]
SCALE = 1 / harness.valid_tokens([document for row in ROWS for document in row])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lcg(n: int, seed: int) -> Tensor:
    """The numbers of the vectors: from a 32-bit LCG, exact in bf16, with a heavy tail."""
    state, numbers = seed, []
    for _ in range(n):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        u = ((state >> 8) / 2**24) * 2 - 1
        numbers.append(u * u * u * 4)
    return torch.tensor(numbers).bfloat16().float()


def stepped(
    p: Tensor,
    g: Tensor,
    *,
    rows: Sequence[int] | None = None,
    m: Tensor | None = None,
    v: Tensor | None = None,
    lr: float = 0.02,
    coef: float = 1.0,
    **attrs: Any,
) -> tuple[Tensor, ...]:
    """Return master, momentum and second moments after a step of one param."""
    settings: dict[str, Any] = {
        "weight_decay": 0.0,
        "momentum": 0.95,
        "beta2": 0.95,
        "cautious": False,
        "lr_scale": "spectral",
        "method": "polar_express",
    }
    start = (torch.zeros_like(g) if m is None else m, torch.zeros(len(g)) if v is None else v)
    scalars = (torch.tensor(coef), torch.tensor(lr), torch.tensor(1), torch.tensor(0))
    fixed: dict[str, Any] = {"copied": (), "copy_dtypes": (), "measured": (), "streams": (0,)}
    parts = (tuple(rows) if rows else (len(g),),)
    return normuon(*scalars, g, p, *start, n=1, rows=parts, **fixed, **(settings | attrs))


# ------------------------------------------------------------------------------------------------------------- vectors


@pytest.mark.parametrize("shape", ["wide", "tall"])
@pytest.mark.parametrize(("method", "name"), [("polar_express", "polar5"), ("newton_schulz", "ns5")])
def test_a_step_is_that_of_the_specification(shape: str, method: str, name: str) -> None:
    vector = VECTORS[f"normuon_{shape}_{name}"]
    rows, columns = vector["shape"]
    p, g = (lcg(rows * columns, vector[seed]).view(rows, columns) for seed in ("p_seed", "g_seed"))
    lr, decay = vector["lr"], vector["wd"]
    new, _, v = stepped(p, g, lr=lr, weight_decay=decay, method=method)
    update = (p * (1 - lr * decay) - new) / lr
    close: dict[str, float] = {"rtol": 1e-3, "atol": 2e-5}
    torch.testing.assert_close(update[0], torch.tensor(vector["update_row0"]), **close)
    torch.testing.assert_close(new[0], torch.tensor(vector["p_row0"]), **close)
    torch.testing.assert_close(v, torch.tensor(vector["v"]), rtol=1e-3, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- orthogonalization


@pytest.mark.parametrize(("method", "low", "high"), [("polar_express", 0.85, 1.15), ("newton_schulz", 0.67, 1.14)])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
def test_singular_values_become_nearly_one_and_singular_vectors_stay(
    method: str, low: float, high: float, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape, generator=generator())
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    o = orthogonalized(x, METHODS[method])
    singular = u.T @ o @ vh.T
    assert low < singular.diagonal().min() and singular.diagonal().max() < high
    assert (singular - singular.diagonal().diag()).abs().max() < 1e-3
    torch.testing.assert_close(orthogonalized(1000 * x, METHODS[method]), o, rtol=1e-3, atol=1e-4)


def test_a_matrix_of_zeros_stays_where_it_is() -> None:
    p = torch.randn(8, 8, generator=generator())
    assert torch.equal(stepped(p, torch.zeros(8, 8))[0], p)


# ----------------------------------------------------------------------------------------------------------- the update


def test_each_logical_matrix_of_a_fused_param_is_updated_by_itself() -> None:
    parts = [torch.randn(rows, 16, generator=generator(rows)) for rows in (32, 8, 12)]
    fused = stepped(torch.zeros(52, 16), torch.cat(parts), rows=(32, 8, 12), lr_scale="match_adamw")
    alone = [stepped(torch.zeros_like(g), g, lr_scale="match_adamw") for g in parts]
    for i, whole in enumerate(fused):
        assert torch.equal(whole, torch.cat([part[i] for part in alone]))
    other = stepped(torch.zeros(52, 16), torch.cat(parts), lr_scale="match_adamw")
    assert not torch.allclose(fused[0], other[0], rtol=0.1)


def test_all_rows_have_updates_of_equal_size_after_the_first_step() -> None:
    """Rows of the gradient differ by 100 times in magnitude. Their second moments make them equal."""
    g = torch.randn(16, 64, generator=generator()) * torch.logspace(-1, 1, 16)[:, None]
    update = stepped(torch.zeros(16, 64), g)[0]
    norms = update.norm(dim=1)
    assert norms.max() / norms.min() < 1.001


@pytest.mark.parametrize("shape", [(32, 128), (128, 32)])
def test_match_adamw_gives_updates_of_rms_02_and_paper_the_same(shape: tuple[int, int]) -> None:
    """The norm of an orthogonalized matrix is about sqrt(min(rows, columns))."""
    g = torch.randn(shape, generator=generator())
    for lr_scale, allowed in (("match_adamw", 0.1), ("paper", 1e-4)):
        rms = stepped(torch.zeros(shape), g, lr=1.0, lr_scale=lr_scale)[0].square().mean().sqrt()
        assert abs(float(rms) / 0.2 - 1) < allowed, lr_scale
    assert factor(128, 32, "spectral") == (2.0, False) and factor(32, 128, "spectral") == (1.0, False)
    assert factor(32, 128, "match_adamw") == (0.2 * sqrt(128), False)


def test_cautious_decay_applies_where_the_update_goes_the_same_way() -> None:
    p, g = (torch.randn(16, 16, generator=generator(seed)) for seed in (1, 2))
    plain = stepped(p, g)[0]
    moved = p - plain
    for cautious, mask in ((True, moved * p >= 0), (False, torch.ones(16, 16, dtype=torch.bool))):
        decayed = stepped(p, g, weight_decay=0.5, cautious=cautious)[0]
        torch.testing.assert_close(plain - decayed, 0.02 * 0.5 * p * mask, rtol=1e-3, atol=1e-6)


def test_bf16_masters_and_momenta_are_rounded_stochastically() -> None:
    """Of 4,096 equal elements some are rounded up and some down, independently in master and momentum."""
    p, g = torch.ones(64, 64), torch.full((64, 64), 0.7)
    exact = stepped(p, g, lr=1e-3)
    rounded = stepped(p.bfloat16(), g, m=torch.zeros(64, 64).bfloat16(), lr=1e-3)
    for new, old in zip(rounded[:2], exact[:2], strict=True):
        assert new.dtype == torch.bfloat16 and len(new.unique()) == 2
        assert new.float().unique()[0] < old.mean() < new.float().unique()[1]
    ups = [(new == new.max()).flatten().double() for new in rounded[:2]]
    assert abs(float(torch.corrcoef(torch.stack(ups))[0, 1])) < 5 / 64


# ------------------------------------------------------------------------------------------------------------- a model


def model(monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any] = CONFIG, **settings: Any) -> harness.PlannedModel:
    monkeypatch.setattr(harness, "OPS", harness.OPS | {"normuon": NORMUON_OP})
    chosen = {"optimizer": NORMUON, "optimizer_options": NorMuonOptions(), "weight_decay": 0.1, "max_grad_norm": 1.0}
    made = harness.PlannedModel(config, 2, 16, **(chosen | settings))
    initialize((v for v in made.assembly.declared if v.init), made.buffers.persistent, seed=3)
    made.executor.run("start")
    return made


def test_matrices_of_blocks_have_momentum_and_row_moments_and_all_else_has_adamws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = model(monkeypatch)
    names = {v.name for v in made.assembly.declared}
    matrices = {f"layers.{i}.{name}" for i in range(2) for name in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")}
    assert {n.removeprefix("normuon.momentum.") for n in names if n.startswith("normuon.momentum.")} == matrices
    others = {v.name for v in made.assembly.trainable} - matrices
    assert {n.removeprefix("normuon.adamw.m.") for n in names if n.startswith("normuon.adamw.m.")} == others
    (op,) = [op for op in made.assembly.programs["update"].ops if op.kind == "normuon"]
    assert sorted(set(op.attrs["rows"])) == [(24,), (32, 16, 16), (40, 40)]


EXPERTS, RANK, WIDTH = 5, 4, 20
MIXTURE = harness.tiny_config(
    **{"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": WIDTH},
    **{"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1, "head_dim": 8},
)
ADAPTED = LoraOptions(lora_rank=RANK, lora_target_parameters=("experts.gate_up_proj", "experts.down_proj"))
OF_EXPERTS: dict[str, dict[str, tuple[int, ...]]] = {
    "trained": {"layers.0.mlp.gate_up": (WIDTH, WIDTH) * EXPERTS, "layers.0.mlp.down": (24,) * EXPERTS},
    "adapters": {
        f"model.layers.0.mlp.experts.{name}_proj.lora_{matrix}_experts": (rows,) * EXPERTS
        for name, matrix, rows in (
            *(("gate_up", "A", RANK), ("gate_up", "B", 2 * WIDTH)),
            *(("down", "A", RANK), ("down", "B", 24)),
        )
    },
}
"""Rows of the matrices of params that hold a matrix of each expert."""


def alone(p: Tensor, gradients: Sequence[Tensor], lr: float, decay: float) -> Tensor:
    """Return one matrix after some steps of NorMuon, in plain torch."""
    m, v = torch.zeros_like(p), torch.zeros(len(p), 1)
    for g in gradients:
        m = 0.95 * m + 0.05 * g
        u = 0.05 * g + 0.95 * m
        x = u.T if u.shape[0] > u.shape[1] else u
        x = x / (1.02 * x.norm() + 1e-6)
        for a, b, c in METHODS["polar_express"].coefficients:
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        o = x.T if u.shape[0] > u.shape[1] else x
        v = 0.95 * v + 0.05 * o.square().mean(1, keepdim=True)
        scaled = o / (v.sqrt() + 1e-10)
        step = scaled * o.norm() / (scaled.norm() + 1e-10) * 0.2 * sqrt(max(o.shape))
        p = p - lr * decay * p * (step * p >= 0) - lr * step
    return p


@pytest.mark.parametrize("case", OF_EXPERTS)
def test_each_expert_is_updated_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Of trained weights gate and up each, of adapters A and B of each expert: two steps against a loop in torch."""
    adapters = [(LORA, ADAPTED)] if case == "adapters" else []
    options = NorMuonOptions(normuon_adapters=bool(adapters))
    made = model(monkeypatch, MIXTURE, adapters=adapters, optimizer_options=options, max_grad_norm=0.0)
    before = {name: made.params[name].clone() for name in OF_EXPERTS[case]}
    gradients: dict[str, list[Tensor]] = {name: [] for name in before}
    values = {v.name: v for v in made.assembly.declared}
    for step in (1, 2):
        made.micro_step(ROWS, SCALE)
        for name, seen in gradients.items():
            seen.append(made.buffers.persistent(values[f"grad.{name}"]).clone())
        made.update(step, lr=0.02)
    for name, rows in OF_EXPERTS[case].items():
        parts = (x.split(rows) for x in (made.params[name], before[name], *gradients[name]))
        for new, old, *seen in zip(*parts, strict=True):
            torch.testing.assert_close(new, alone(old, seen, 0.02, 0.1), rtol=1e-4, atol=1e-5)


def test_adapters_are_adamws_unless_normuon_adapters_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def orthogonalized(**options: bool) -> set[str]:
        made = model(monkeypatch, MIXTURE, adapters=[(LORA, ADAPTED)], optimizer_options=NorMuonOptions(**options))
        names = {v.name for v in made.assembly.declared}
        return {n.removeprefix("normuon.momentum.") for n in names if n.startswith("normuon.momentum.")}

    assert orthogonalized() == set()
    found = orthogonalized(normuon_adapters=True)
    assert OF_EXPERTS["adapters"].keys() < found and sum("self_attn" in name for name in found) == 8


def test_its_time_is_that_of_products_in_bf16_and_of_the_bytes_of_element_wise_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fp32 throughout: per element 4 bytes of the gradient, 16 of master and momentum, 10 of the products' operand."""
    (op,) = [op for op in model(monkeypatch).assembly.programs["update"].ops if op.kind == "normuon"]
    gpu, n = device("h200"), op.attrs["n"]
    elements = sum(grad.size for grad in op.ins[4 : 4 + n])
    rows = sum(v.size for v in op.ins[4 + 3 * n :])
    assert passes(op) == 30 * elements + 8 * rows + sum(v.nbytes for v in op.ins[:4])
    (kernel,) = KERNELS
    assert kernel.memory_efficiency is not None
    bandwidth = kernel.memory_efficiency * gpu.bandwidth
    products = max(flops(op) / gpu.flops["bf16"], traffic(op) / bandwidth)
    assert op_cost(op, NORMUON_OP, gpu, kernel).seconds == gpu.launch_seconds + products + passes(op) / bandwidth


@pytest.mark.parametrize("target", ["h200", "cpu"])
def test_a_kernel_serves_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (op,) = [op for op in model(monkeypatch).assembly.programs["update"].ops if op.kind == "normuon"]
    kernel = load_registry().kernel_for(op, Target(device(target)), "bf16").kernel
    assert (kernel is not None) == (target == "h200")
