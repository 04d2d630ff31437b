"""LoRA's dropout: which elements it drops, that backward and recomputation drop the same, and evaluations none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.harness import (
    OPS,
    PlannedModel,
    hf_loss_sum,
    random_documents,
    random_hf_model,
    relative_error,
    tiny_config,
    valid_tokens,
)
from random_programs import VOCABULARY
from small_programs import INIT, train
from torch import Tensor

from surogate_core.api import Builder, ProgramError, Value
from surogate_lora.adapter import LORA
from surogate_lora.ops import DRAWS, dropped_draws, kept_scale
from surogate_lora.ops import OPS as LORA_OPS
from surogate_lora.options import LoraOptions
from surogate_lora.reference import lora_dropout

peft = pytest.importorskip("peft", reason="PEFT is what LoRA is compared with: pip install peft")

ROWS = [[document] for document in random_documents([24, 17, 24], tiny_config()["vocab_size"])]
SCALE = 1 / valid_tokens([document for row in ROWS for document in row])
RATE = 0.3


def dropped(
    x: Tensor, rate: float = RATE, *, micro_step: int = 3, seed: int = 11, stream: int = 77, row: int = 0
) -> Tensor:
    scalars = torch.tensor(micro_step, dtype=torch.int32), torch.tensor(seed)
    return lora_dropout(x, *scalars, rate=rate, stream=stream, row=row)


# ---------------------------------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
def test_as_many_elements_are_dropped_as_independent_draws_would(rate: float) -> None:
    """Of n elements, binomial: mean n p within 5 standard errors over g groups; the variance over the groups is n p q
    within 5 of its own, n p q sqrt((2 + (1 - 6 p q) / (n p q)) / g)."""
    n, groups = 64, 8192
    p = dropped_draws(rate) / DRAWS
    counts = (dropped(torch.ones(groups, n), rate) == 0).sum(1).double()
    variance = n * p * (1 - p)
    assert abs(float(counts.mean()) - n * p) <= 5 * (variance / groups) ** 0.5
    spread = variance * ((2 + (1 - 6 * p * (1 - p)) / variance) / groups) ** 0.5
    assert abs(float(counts.var()) - variance) <= 5 * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(dtype: torch.dtype) -> None:
    """Of N ones: the mean of the results is 1, its standard error sqrt(p / q / N)."""
    x = torch.randn(1000, 257, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = dropped(x)
    wide = x.double() if dtype == torch.float64 else x.float()
    assert torch.equal(y[y != 0], (kept_scale(RATE) * wide).to(dtype)[y != 0])
    p = dropped_draws(RATE) / DRAWS
    ones = dropped(torch.ones(1000, 257))
    assert abs(float(ones.double().mean()) - 1) <= 5 * (p / (1 - p) / ones.numel()) ** 0.5


def test_a_dropped_element_is_zero_whatever_it_held() -> None:
    mask = dropped(torch.ones(64, 64)) == 0
    for held in (torch.inf, torch.nan, -0.0):
        y = dropped(torch.full((64, 64), held))
        assert not y[mask].any() and not torch.signbit(y[mask]).any()


@pytest.mark.parametrize("columns", [1, 7, 64, 301])
def test_rows_of_a_matrix_drop_what_the_matrix_drops(columns: int) -> None:
    x = torch.randn(200, columns, generator=torch.Generator().manual_seed(columns))
    for first, last in ((0, 128), (128, 200), (3, 4), (77, 200)):
        assert torch.equal(dropped(x[first:last], row=first), dropped(x)[first:last])


@pytest.mark.parametrize("other", [{"micro_step": 4}, {"seed": 12}, {"seed": 11 + (1 << 32)}, {"stream": 78}], ids=str)
def test_another_micro_step_seed_or_module_drops_other_elements(other: dict[str, int]) -> None:
    """Independent masks correlate by less than 5 / sqrt(N)."""
    x = torch.ones(512, 512)
    masks = torch.stack([(dropped(x) == 0).flatten(), (dropped(x, **other) == 0).flatten()]).double()
    assert abs(float(torch.corrcoef(masks)[0, 1])) <= 5 / x.numel() ** 0.5


def test_a_rate_is_a_number_of_draws_neither_none_nor_all() -> None:
    assert [dropped_draws(rate) for rate in (1e-9, 0.25, 0.1, 1 - 1e-9)] == [1, DRAWS // 4, 6554, DRAWS - 1]
    assert kept_scale(0.25) == 4 / 3 and kept_scale(1 - 1e-9) == DRAWS


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_the_op_refuses_what_is_no_share(rate: float) -> None:
    b = Builder(OPS, "fp32")
    x, micro_step, seed = b.input("x", (4, 4), "fp32"), b.input("micro_step", (), "int32"), b.input("seed", (), "int64")
    with b.record("forward"):
        with pytest.raises(ProgramError, match="a share between 0 and 1"):
            b.apply("lora_dropout", x, micro_step, seed, rate=rate, stream=0)
        with pytest.raises(ProgramError, match="micro_step is an int32"):
            b.apply("lora_dropout", x, seed, micro_step, rate=0.5, stream=0)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """The op is linear once its elements are fixed, and so is the loss: differences err by rounding alone."""

    def build(b: Builder) -> Value:
        named = {v.name: v for v in b.declared}
        x = b.param("x", (9, 7), INIT)
        y = b.apply("lora_dropout", x, named["micro_step"], named["seed"], rate=RATE, stream=5)
        return b.apply("toy_dot", y, b.input("direction", (9, 7), "fp64"))

    trained = train(build, ops=VOCABULARY | {op.kind: op for op in LORA_OPS}, contents={"micro_step": torch.tensor(6)})
    gradient = trained.run()["x"]
    assert 0 < int((gradient == 0).sum()) < gradient.numel()
    x = trained.param("x")
    for i in range(9):
        for j in range(7):
            x[i, j] += 1e-3
            above = trained.value_of_loss()
            x[i, j] -= 2e-3
            assert (above - trained.value_of_loss()) / 2e-3 == pytest.approx(float(gradient[i, j]), abs=1e-9)
            x[i, j] += 1e-3


# --------------------------------------------------------------------------------------------------------- in a model


def planned(rate: float, **settings: Any) -> PlannedModel:
    """The tiny model on fixed weights, with B drawn so that branches matter."""
    options = LoraOptions(lora_rank=4, lora_dropout=rate)
    model = PlannedModel(tiny_config(), 3, 24, lmhead_chunks=3, adapters=[(LORA, options)], **settings)
    model.load(random_hf_model(tiny_config()).state_dict())
    for i, value in enumerate(model.assembly.trainable):
        model.params[value.name].normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
    return model


def step(model: PlannedModel, micro_step: int, *, seed: int = 5, first: bool = True) -> float:
    scalars = model.assembly.scalars
    for value, content in ((scalars.micro_step, micro_step), (scalars.seed, seed)):
        model.buffers.persistent(value).fill_(content)
    return model.micro_step(ROWS, SCALE, first=first)


def gradients(model: PlannedModel) -> dict[str, Tensor]:
    grads = [v for v in model.assembly.declared if v.role == "grad"]
    return {v.name.removeprefix("grad."): model.buffers.persistent(v).clone() for v in grads}


def kinds(model: PlannedModel, program: str) -> list[tuple[str, str]]:
    return [(op.kind, op.phase) for op in model.assembly.programs[program].ops]


def test_a_rate_of_zero_emits_no_op() -> None:
    assert not any(
        kind == "lora_dropout" for name in ("micro_first", "evaluate") for kind, _ in kinds(planned(0), name)
    )


def test_an_evaluation_is_the_one_without_dropout() -> None:
    """In fp32; A of projections that share an input is one product without dropout, hence another order of sums."""
    with_dropout, without = planned(RATE), planned(0)
    assert "lora_dropout" not in {kind for kind, _ in kinds(with_dropout, "evaluate")}
    losses = []
    for model in (with_dropout, without):
        model.write(ROWS, 1.0)
        model.executor.run("evaluate")
        losses.append(model.buffers.persistent(model.assembly.eval_loss).clone())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert step(with_dropout, 0) != step(without, 0)


def test_every_projection_drops_its_own_elements_and_nothing_waits_for_the_backward_pass() -> None:
    """7 projections in 4 layers: forward, again in the backward pass for A's gradient, and on the way back.

    On the way back all but those of the first layer's q, k, v, whose input no adapter changes.
    """
    model = planned(RATE)
    ops = [op for op in model.assembly.programs["micro_first"].ops if op.kind == "lora_dropout"]
    phases = [op.phase for op in ops]
    assert [phases.count(p) for p in ("forward", "recompute", "backward")] == [28, 28, 25]
    assert len({op.attrs["stream"] for op in ops}) == 28
    outs = {op.outs[0] for op in ops if op.phase == "forward"}
    reading = [op for op in model.assembly.programs["micro_first"].ops if outs & set(op.ins)]
    assert {op.phase for op in reading} == {"forward"}


def streams(model: PlannedModel) -> dict[str, int]:
    """The random stream of every adapted module, by its name in the checkpoint."""
    ops = model.assembly.programs["micro_first"].ops
    of_value = {op.outs[0]: op.attrs["stream"] for op in ops if op.kind == "lora_dropout" and op.phase == "forward"}
    packed = {
        op.outs[at.whole]: part.name.removesuffix(".lora_A")
        for op in ops
        if op.kind == "lora_pack"
        for part, at in zip(op.ins, op.attrs["places"], strict=True)
        if part.name.endswith(".lora_A")
    }
    return {packed[op.ins[1]]: of_value[op.ins[0]] for op in ops if op.kind == "linear" and op.ins[0] in of_value}


class OurMask(torch.nn.Module):
    """Stands in for a dropout of PEFT: drops what our op drops in these rows of the packed batch."""

    def __init__(self, stream: int, micro_step: int, rows: list[slice]) -> None:
        super().__init__()
        self.stream, self.micro_step, self.rows = stream, micro_step, rows

    def forward(self, x: Tensor) -> Tensor:
        mask = dropped(torch.ones(72, x.shape[-1]), micro_step=self.micro_step, seed=5, stream=self.stream)
        return x * mask[self.rows[-1]]


def test_loss_and_gradients_equal_pefts_when_it_drops_the_same_elements() -> None:
    """As without dropout: fp32 in another order. `rows` ends with the rows of the document that PEFT is given."""
    model, micro_step = planned(RATE), 9
    config = peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=RATE, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(random_hf_model(tiny_config()), config).train()
    rows: list[slice] = []
    parameters = {
        n.removeprefix("base_model.model.").removesuffix(".default.weight"): p for n, p in theirs.named_parameters()
    }
    for module, stream in streams(model).items():
        layer = theirs.get_submodule(f"base_model.model.{module}")
        assert layer.lora_dropout["default"].p == RATE
        layer.lora_dropout["default"] = OurMask(stream, micro_step, rows)
    with torch.no_grad():
        for value in model.assembly.trainable:
            parameters[value.name].copy_(model.params[value.name])
    expected = torch.zeros(())
    for i, (document,) in enumerate(ROWS):
        rows.append(slice(24 * i, 24 * i + len(document)))
        expected = expected + hf_loss_sum(theirs, [document]) * SCALE
    expected.backward()
    assert step(model, micro_step) == pytest.approx(expected.item(), rel=1e-5)
    errors = {name: relative_error(grad, parameters[name].grad) for name, grad in gradients(model).items()}
    assert len(errors) == 56 and max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("parts", ["qkv", "att ffn", "block rmsnorm swiglu"])
def test_recomputation_changes_no_bit(parts: str) -> None:
    plain, saving = planned(RATE), planned(RATE, recompute=frozenset(parts.split()))
    assert step(plain, 4) == step(saving, 4)
    theirs = gradients(saving)
    assert all(torch.equal(grad, theirs[name]) for name, grad in gradients(plain).items())


def test_micro_steps_drop_other_elements_and_the_same_one_the_same() -> None:
    model = planned(RATE)
    losses = [step(model, micro_step, seed=seed) for micro_step, seed in ((0, 5), (1, 5), (0, 6), (0, 5))]
    assert losses[0] == losses[3] and len(set(losses)) == 3
    step(model, 0)
    both = step(model, 1, first=False)
    assert both == pytest.approx(losses[0] + losses[1], rel=1e-6)
