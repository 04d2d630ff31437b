"""DPO, ORPO, SimPO and KTO beside plain torch in float64: losses, rewards and gradients of an adapter, in any rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models.groups import gradients, step
from models.harness import PlannedModel, random_documents, random_hf_model, relative_error, tiny_config
from pydantic import ValidationError
from torch import Tensor

from surogate_core.api import ConfigError
from surogate_core.testing.ops import check_op
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_loss_preference.kto import KTO, mismatched
from surogate_loss_preference.losses import LOSSES
from surogate_loss_preference.ops import OPS
from surogate_loss_preference.reference import document_sums_bwd, pair_loss

peft = pytest.importorskip("peft", reason="PEFT is what the policy is compared with: pip install peft")

BY_NAME = {loss.name: loss for loss in (*LOSSES, KTO)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid": ("dpo", {}),
    "smoothed": ("dpo", {"dpo_beta": 0.5, "dpo_label_smoothing": 0.2}),
    "hinge": ("dpo", {"dpo_loss": "hinge", "dpo_beta": 0.3}),
    "ipo": ("dpo", {"dpo_loss": "ipo"}),
    "rpo": ("dpo", {"rpo_alpha": 0.7, "dpo_beta": 0.2}),
    "orpo": ("orpo", {"orpo_beta": 0.4}),
    "simpo": ("simpo", {"simpo_gamma": 0.7}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kto": ("kto", {"kto_beta": 0.3, "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.5}),
}
DOCUMENTS = random_documents([7, 5, 6, 6, 4, 9], tiny_config()["vocab_size"])
PAIRS = [(DOCUMENTS[i], DOCUMENTS[i + 1]) for i in (0, 2, 4)]
PACKED = [[*PAIRS[0], *PAIRS[1]], [*PAIRS[2]], []]
ALONE = [[*pair] for pair in PAIRS]
TOLERANCE = 1e-5


def options(**keys: Any) -> LoraOptions:
    return LoraOptions(lora_rank=4, lora_alpha=8, **keys)


def planned(case: str, **settings: Any) -> PlannedModel:
    name, keys = (CASES | OTHERS)[case]
    loss = BY_NAME[name]
    given = {"loss": loss, "loss_options": loss.options(**keys), "adapters": [(LORA, options())]} | settings
    return PlannedModel(tiny_config(), 3, 24, lmhead_chunks=3, **given)


def policy() -> Any:
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(random_hf_model(tiny_config()), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model


def fill(model: PlannedModel, theirs: Any) -> PlannedModel:
    model.load(random_hf_model(tiny_config()).state_dict())
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            ours = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            model.params[ours].copy_(parameter.detach())
    return model


def log_probs(model: Any, document: list[int]) -> Tensor:
    ids = torch.tensor(document)[None]
    return -F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")


def expected(case: str, theirs: Any) -> dict[str, Tensor]:
    """The figures by the formulas and names of TRL's DPO, ORPO and CPO trainers, of each pair alone."""
    name, keys = CASES[case]
    o = BY_NAME[name].options(**keys)
    every = []
    for pair in PAIRS:
        p = [log_probs(theirs, document) for document in pair]
        with torch.no_grad(), theirs.disable_adapter():
            r = [log_probs(theirs, document) for document in pair]
        mean = name != "dpo" or o.dpo_loss == "ipo"
        pc, pr, rc, rr = (x.mean() if mean else x.sum() for x in (*p, *r))
        figures = {"nll_loss": -p[0].mean()} if name == "orpo" or keys.get("rpo_alpha") else {}
        if name != "dpo":
            rc, rr = torch.zeros(()), torch.zeros(())
        logits = (pc - pr) - (rc - rr)
        if name == "orpo":
            beta = o.orpo_beta
            odds = (pc - pr) - (torch.log1p(-torch.exp(pc)) - torch.log1p(-torch.exp(pr)))
            loss = -pc - beta * F.logsigmoid(odds)
            figures |= {"log_odds_ratio": F.logsigmoid(odds), "log_odds_chosen": odds}
        elif name == "simpo":
            beta = o.simpo_beta
            loss = -F.logsigmoid(beta * (logits - o.simpo_gamma / beta))
        else:
            beta, smoothing = o.dpo_beta, o.dpo_label_smoothing
            loss = {
                "sigmoid": -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing,
                "hinge": torch.relu(1 - beta * logits),
                "ipo": (logits - 1 / (2 * beta)) ** 2,
            }[o.dpo_loss] + (o.rpo_alpha or 0) * -p[0].mean()
        if keys.get("dpo_loss") == "ipo":  # whose rewards TRL makes of sums
            pc, pr, rc, rr = (x.sum() for x in (*p, *r))
        rewards = beta * (pc - rc), beta * (pr - rr)
        figures |= {"rewards/chosen": rewards[0], "rewards/rejected": rewards[1]}
        figures |= {"rewards/margins": rewards[0] - rewards[1], "logps/chosen": pc, "logps/rejected": pr}
        every.append({"loss": loss, **figures, "rewards/accuracies": (rewards[0] > rewards[1]).float()})
    return {name: torch.stack([one[name] for one in every]).mean() for name in every[0]}


@pytest.mark.parametrize("case", CASES)
def test_figures_and_gradients_are_those_of_plain_torch(case: str) -> None:
    theirs = policy()
    model = fill(planned(case), theirs)
    wanted = expected(case, theirs.double())
    wanted["loss"].backward()
    found = step(model, PACKED)
    assert found == pytest.approx(
        {name: float(value.detach()) for name, value in wanted.items()}, rel=TOLERANCE, abs=1e-6
    )
    ours = gradients(model)
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            own = ours[name.removeprefix("base_model.model.").removesuffix(".default.weight")]
            assert relative_error(own, parameter.grad) <= TOLERANCE, name
    assert step(model, PACKED, "evaluate") == pytest.approx(found, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_rows_do_not_matter_to_rounding_and_recomputation_keeps_the_bits(case: str) -> None:
    theirs = policy()
    model = fill(planned(case), theirs)
    packed, grads = step(model, PACKED), gradients(model)
    alone = step(model, ALONE)
    assert alone == pytest.approx(packed, rel=1e-5, abs=1e-6)
    for name, gradient in gradients(model).items():
        assert relative_error(gradient, grads[name]) <= TOLERANCE, name
    again = fill(planned(case, recompute=frozenset({"block", "adapter"})), theirs)
    assert step(again, PACKED) == packed
    assert all(torch.equal(gradient, grads[name]) for name, gradient in gradients(again).items())


def test_the_reference_is_the_model_before_training_and_has_no_backward_pass() -> None:
    model = planned("sigmoid")
    micro = model.assembly.programs["micro_first"]
    reference = [op for op in micro.ops if op.phase == "reference"]
    assert {op.block for op in reference} >= {0, 1, 2, 3}
    adapters = {v for op in reference for v in op.ins if v.role == "param" and "lora" in v.name}
    assert not adapters
    fresh = fill(model, peft.get_peft_model(random_hf_model(tiny_config()), peft.LoraConfig(r=4)))
    for name, value in model.params.items():
        if "lora_B" in name:
            value.zero_()
    found = step(fresh, PACKED)
    assert (found["rewards/chosen"], found["rewards/margins"]) == (0, 0) and found["loss"] == pytest.approx(0.6931472)


def test_a_frozen_reference_is_the_weights_before_the_first_step() -> None:
    base, theirs = random_hf_model(tiny_config()).double(), random_hf_model(tiny_config())
    model = planned("sigmoid", adapters=[], frozen_reference=True)
    model.load(theirs.state_dict())
    model.executor.run("start")
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.load(theirs.state_dict())
    found = step(model, PACKED)
    theirs.double()
    with torch.no_grad():
        r = [log_probs(base, document).sum() for document in DOCUMENTS]
    h = torch.stack([log_probs(theirs, d).sum() - own for d, own in zip(DOCUMENTS, r, strict=True)]).view(-1, 2)
    loss = -F.logsigmoid(0.1 * (h[:, 0] - h[:, 1])).mean()
    loss.backward()
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert found["rewards/chosen"] == pytest.approx(float(0.1 * h[:, 0].detach().mean()), rel=TOLERANCE)
    for name, gradient in model.gradients.items():
        assert relative_error(gradient, theirs.get_parameter(name).grad) <= TOLERANCE, name
    micro = model.assembly.programs["micro_first"]
    read = {v.role for op in micro.ops if op.phase == "reference" for v in op.ins if "." in v.name and v.role != "act"}
    assert read == {"state"}


def test_a_reference_that_would_change_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss: dpo compares .* trains no adapter\. Set lora: true"):
        planned("sigmoid", adapters=[])
    trained = [(LORA, options(lora_modules_to_save=["norm"]))]
    with pytest.raises(ConfigError, match=r"loss: dpo .* trains params of the model itself: layers.0.attn.norm"):
        planned("sigmoid", adapters=trained)
    with pytest.raises(ConfigError, match=r"loss: kto compares .* trains no adapter"):
        planned("kto", adapters=[])
    planned("orpo", adapters=[])
    with pytest.raises(ConfigError, match=r"reference: frozen .* loss: orpo reads no reference\. Leave it out"):
        planned("orpo", adapters=[], frozen_reference=True)
    with pytest.raises(ConfigError, match=r"reference: frozen .* an adapter leaves the model as it is\. Leave it out"):
        planned("sigmoid", frozen_reference=True)


DESIRABLE = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def span(document: list[int]) -> tuple[Any, Any]:
    return np.array(document, np.int32), np.array([*document[1:], -100], np.int32)


def moved(rows: list[list[list[int]]]) -> list[list[list[int]]]:
    return [[tokens.tolist() for tokens, _ in mismatched([span(d) for d in row])] for row in rows]


def log_ratios(theirs: Any, documents: list[list[int]]) -> Tensor:
    with torch.no_grad(), theirs.disable_adapter():
        reference = torch.stack([log_probs(theirs, document).sum() for document in documents])
    return torch.stack([log_probs(theirs, document).sum() for document in documents]) - reference


def test_loss_and_gradients_are_those_of_plain_torch_and_kl_is_of_mismatched_answers() -> None:
    theirs = policy()
    model = fill(planned("kto"), theirs)
    theirs.double()
    batch = model.assembly.batch
    column, mean = (model.buffers.persistent(v) for v in (batch.columns["desirable"], batch.means["log_ratio"]))
    column[:] = 0
    column[: len(DESIRABLE), 0] = torch.tensor(DESIRABLE)
    mean.fill_(0)
    said = torch.stack([log_probs(theirs, document).sum() for document in DOCUMENTS]).detach()
    others = moved(PACKED)
    z = float(log_ratios(theirs, [document for row in others for document in row]).detach().mean())
    found = step(model, others, "evaluate", units=6, group=1)
    assert found["log_ratio"] == pytest.approx(z, abs=TOLERANCE) and abs(z) > 1e-2
    for kl in (z, -z):
        mean.fill_(kl)
        theirs.zero_grad()
        h = log_ratios(theirs, DOCUMENTS)
        wanted = torch.tensor(DESIRABLE) > 0
        at = max(kl, 0.0)
        losses = torch.where(wanted, 1.5 * (1 - (0.3 * (h - at)).sigmoid()), 0.5 * (1 - (0.3 * (at - h)).sigmoid()))
        losses.mean().backward()
        found = step(model, PACKED, units=6, group=1)
        signed = torch.where(wanted, h - at, at - h)
        expected = {
            "loss": losses.mean(),
            "log_ratio": h.mean(),
            "kl": torch.tensor(at),
            "signed_reward": 0.3 * signed.mean(),
            "rewards/accuracies": (signed > 0).double().mean(),
            "rewards/chosen": 0.3 * h[wanted].mean(),
            "rewards/rejected": 0.3 * h[~wanted].mean(),
            "rewards/margins": 0.3 * (h[wanted].mean() - h[~wanted].mean()),
            "logps/chosen": said[wanted].mean(),
            "logps/rejected": said[~wanted].mean(),
        }
        assert found == pytest.approx({n: float(v.detach()) for n, v in expected.items()}, rel=TOLERANCE, abs=1e-6)
        ours = gradients(model)
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                own = ours[name.removeprefix("base_model.model.").removesuffix(".default.weight")]
                assert relative_error(own, parameter.grad) <= TOLERANCE, name


def test_a_step_of_one_label_has_no_reward_of_the_other_one() -> None:
    model = fill(planned("kto"), policy())
    batch = model.assembly.batch
    column, mean = (model.buffers.persistent(v) for v in (batch.columns["desirable"], batch.means["log_ratio"]))
    mean.fill_(0)
    for label, of, lacks in ((1.0, "chosen", "rejected"), (0.0, "rejected", "chosen")):
        column[:] = label
        found = step(model, PACKED, units=6, group=1)
        assert {f"rewards/{of}", f"logps/{of}"} < found.keys()
        assert found.keys().isdisjoint({f"rewards/{lacks}", f"logps/{lacks}", "rewards/margins"})


def test_margins_are_subtracted_from_what_the_loss_reads_and_not_from_rewards() -> None:
    sums, labels, scale = torch.tensor([[2.0, -1.0], [0.5, 0.75]]), torch.ones(2, 2), torch.tensor(0.5)
    margins = torch.tensor([[0.5, 9.0], [2.0, 9.0]])
    loss, *figures = pair_loss(sums, labels, scale, margins, form="sigmoid", beta=1.0, margined=True)
    h = sums[:, 0] - sums[:, 1]
    assert torch.equal(loss, -F.logsigmoid(h - margins[:, 0]).mean())
    plain = pair_loss(sums, labels, scale, form="sigmoid", beta=1.0)
    assert all(map(torch.equal, figures, plain[1:])) and not torch.equal(loss, plain[0])


def test_a_weight_of_the_cross_entropy_that_is_none_is_refused() -> None:
    for weight in (0, -1.0, float("nan"), "much"):
        with pytest.raises(ValidationError, match="rpo_alpha"):
            BY_NAME["dpo"].options(rpo_alpha=weight)


def test_references_of_the_ops_fit_their_shape_rules_and_gradients() -> None:
    ops = {op.kind: op for op in OPS}
    values, targets = torch.randn(12), torch.tensor([1] * 5 + [-100] * 2 + [3] * 4 + [-100], dtype=torch.int32)
    groups = torch.tensor([[[0, 4], [4, 11]], [[0, 0], [0, 0]]], dtype=torch.int32)
    sums, labels = check_op(ops["document_sums"], values, targets, groups)
    assert labels.tolist() == [[4, 5], [0, 0]] and sums[0, 0] == values[:4].sum()
    d = torch.randn(2, 2)
    (gradient,) = check_op(ops["document_sums_bwd"], d, targets, groups)
    assert torch.equal(gradient, document_sums_bwd(d, targets, groups)) and gradient[3] == d[0, 0] and gradient[11] == 0
    scale = torch.tensor(0.5)
    loss, *_ = check_op(ops["pair_loss"], sums, labels, scale, sums, form="sigmoid", beta=0.1)
    assert float(loss) == pytest.approx(0.5 * 0.6931472)


@pytest.mark.parametrize("certain", [(0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (-1e-8, -1e-8)])
def test_orpo_of_an_answer_that_is_certain_is_finite(certain: tuple[float, float]) -> None:
    sums = torch.tensor([certain], requires_grad=True)
    loss, *_ = pair_loss(sums, torch.ones(1, 2), torch.tensor(1.0), form="orpo", beta=0.1)
    loss.backward()
    assert bool(loss.isfinite()) and sums.grad is not None and bool(sums.grad.isfinite().all())
