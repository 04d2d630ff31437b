"""The loss `tokens` beside a plain torch model: losses, figures and gradients, packed and alone, with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.harness import PlannedModel, packed_documents, random_hf_model, relative_error, tiny_config
from torch import Tensor

from surogate_core.api import ConfigError, Encoded
from surogate_core.testing.ops import check_op
from surogate_loss_tokens.loss import TOKENS, TokensOptions
from surogate_loss_tokens.ops import OPS
from surogate_loss_tokens.reference import lm_head_tokens, lm_head_tokens_bwd, token_loss, token_loss_bwd
from surogate_loss_tokens.weighted import WEIGHTED

T, C, V = 12, 8, 11
TARGETS = torch.tensor([3, -100, 5, 0, 10, -100, -100, 2, 2, 7, 1, -100], dtype=torch.int32)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(x: Tensor, w: Tensor, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, valid = x @ w.T, TARGETS >= 0
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    labels = TARGETS.clamp(min=0).long()
    return (
        -F.cross_entropy(logits, labels, reduction="none") * valid,
        logits.logsumexp(-1) * valid,
        logits.mean(-1) * valid,
    )


@pytest.mark.parametrize(("chunks", "softcap"), [(1, 0.0), (3, 0.0), (3, 1.5)])
def test_outputs_and_gradients_are_those_of_a_plain_head(chunks: int, softcap: float) -> None:
    x, w = drawn(T, C).requires_grad_(), drawn(V, C, seed=1).requires_grad_()
    expected, gradients = plain(x, w, softcap), [drawn(T, seed=seed) for seed in (2, 3, 4)]
    found = lm_head_tokens(x.detach(), w.detach(), TARGETS, chunks=chunks, softcap=softcap)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
    torch.autograd.backward(expected, gradients)
    given = (x.detach(), w.detach(), TARGETS, found[1], *gradients)
    for ours, value in zip(lm_head_tokens_bwd(*given, chunks=chunks, softcap=softcap), (x, w), strict=True):
        assert value.grad is not None
        torch.testing.assert_close(ours, value.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.kind)
def test_references_fit_the_shape_rules(op: Any) -> None:
    x, w, row, one = drawn(T, C).float(), drawn(V, C).float(), drawn(T).float(), torch.tensor(0.5)
    head = (x, w, TARGETS)
    ins = {
        "lm_head_tokens": head,
        "lm_head_tokens_bwd": (*head, row, row, row, row),
        "lm_head_tokens_dgrad": (*head, row, row, row, row),
        "token_loss": (row, row, row, one, row),
        "token_loss_bwd": (row, one, one, one, one, row),
    }[op.kind]
    attrs = {"chunks": 3} if op.kind.startswith("lm_head") else {"z": 0.5}
    check_op(op, *ins, **attrs)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_the_sums_are_those_of_autograd(weighted: bool) -> None:
    columns, weights = [drawn(T, seed=i).requires_grad_() for i in range(3)], [drawn(T, seed=3)] * weighted
    scale, *seeds = drawn(4, seed=4).unbind()
    attrs = {"smoothing": 0.3, "z": 0.7}
    torch.autograd.backward(token_loss(*columns, scale, *weights, **attrs), seeds)
    found = token_loss_bwd(columns[1].detach(), scale, *seeds, *weights, **attrs)
    for ours, column in zip(found, columns, strict=True):
        torch.testing.assert_close(ours, column.grad)


# ------------------------------------------------------------------------------------------------------ the whole loss

DOCUMENTS = packed_documents()
FLAT = [document for row in DOCUMENTS for document in row]
LABELS = sum(len(document) - 1 for document in FLAT)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "z-loss": {"tokens_z_loss": 0.02},
    "smoothed": {"tokens_label_smoothing": 0.2},
    "all": {"tokens_z_loss": 0.02, "tokens_label_smoothing": 0.2, "tokens_weights": True},
}


def weight_of(token: int) -> float:
    return token % 5 / 4


def trained(
    keys: dict[str, Any], rows: list[list[list[int]]], **settings: Any
) -> tuple[PlannedModel, dict[str, float]]:
    options = TokensOptions(**keys)
    model = PlannedModel(tiny_config(), len(rows), 24, loss=TOKENS, loss_options=options, lmhead_chunks=3, **settings)
    model.load(random_hf_model(tiny_config()).state_dict())
    model.write(rows, 1 / LABELS)
    batch = model.assembly.batch
    targets = model.buffers.persistent(batch.targets)
    for column in batch.columns.values():
        model.buffers.persistent(column).copy_(torch.where(targets >= 0, targets % 5 / 4, 0))
    model.executor.run("micro_first")
    return model, {f.name: float(model.buffers.persistent(f.step)) for f in model.assembly.reported}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_plain_torch(case: str) -> None:
    keys, theirs = CASES[case], random_hf_model(tiny_config())
    smoothing, factor = keys.get("tokens_label_smoothing", 0.0), keys.get("tokens_z_loss", 0.0)
    loss, z, plain_loss = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for document in FLAT:
        ids = torch.tensor(document)[None]
        logits, labels = theirs(input_ids=ids).logits[0, :-1], ids[0, 1:]
        each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        weights = torch.tensor([weight_of(int(label)) for label in labels])
        loss = loss + (each * weights if keys.get("tokens_weights") else each).sum() / LABELS
        z = z + factor * logits.logsumexp(-1).square().sum() / LABELS
        plain_loss = plain_loss + F.cross_entropy(logits, labels, reduction="sum").detach() / LABELS
    (loss + z).backward()
    model, found = trained(keys, DOCUMENTS)
    wanted = {"loss": loss, "z_loss": z, "cross_entropy": plain_loss}
    assert found == pytest.approx({name: float(wanted[name].detach()) for name in found}, rel=1e-5)
    assert ("z_loss" in found) == bool(factor)
    named = dict(theirs.named_parameters())
    for name, gradient in model.gradients.items():
        assert relative_error(gradient, named[name].grad) <= 1e-5, name


def test_packed_rows_are_documents_alone_and_recomputation_keeps_the_bits() -> None:
    model, packed = trained(CASES["all"], DOCUMENTS)
    _, alone = trained(CASES["all"], [[document] for document in FLAT])
    assert alone == pytest.approx(packed, rel=1e-6)
    again, recomputed = trained(CASES["all"], DOCUMENTS, recompute=frozenset({"block"}))
    assert recomputed == packed
    assert all(torch.equal(g, model.gradients[name]) for name, g in again.gradients.items())


def test_no_op_of_the_programs_holds_all_logits() -> None:
    model, _ = trained(CASES["all"], DOCUMENTS)
    vocabulary = (tiny_config()["vocab_size"],)
    micro = model.assembly.programs["micro_first"]
    assert not [v for op in micro.ops for v in op.outs if v.role == "act" and v.shape[-1:] == vocabulary]


# ---------------------------------------------------------------------------------------------------- the dataset type


class Letters:
    eos_id = 99

    def encode_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_each_token_of_a_segment_has_its_weight() -> None:
    segments = [{"text": "ab", "weight": 0}, {"text": "c", "weight": 0.5}, {"text": "d"}]
    found = WEIGHTED.encode({"segments": segments}, Letters(), WEIGHTED.options())
    assert isinstance(found, Encoded)
    assert list(found.tokens) == [97, 98, 99, 100, 99]
    assert list(found.trained) == [False, False, True, True, True]
    assert found.columns == {"weight": [0, 0, 0.5, 1, 1]}


@pytest.mark.parametrize(
    "segments",
    [
        "text",
        [{"text": 5}],
        [{"text": "a", "weight": -1}],
        [{"text": "a", "weigth": 1}],
        [{"text": "", "weight": True}],
    ],
)
def test_segments_that_are_none_are_refused(segments: Any) -> None:
    with pytest.raises(ConfigError, match=r"segments"):
        WEIGHTED.encode({"segments": segments}, Letters(), WEIGHTED.options())
