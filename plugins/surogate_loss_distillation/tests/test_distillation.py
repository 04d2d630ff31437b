"""The loss `distillation` beside plain torch: figures and gradients, in any rows, with any number of top tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.harness import PlannedModel, packed_documents, random_hf_model, relative_error, tiny_config
from pydantic import ValidationError
from torch import Tensor

from surogate_core.api import ConfigError, ProgramError
from surogate_core.testing.ops import check_op
from surogate_loss_distillation.loss import DISTILLATION
from surogate_loss_distillation.ops import OPS
from surogate_loss_distillation.options import DistillationOptions
from surogate_loss_distillation.reference import lm_head_distill, lm_head_distill_grads
from surogate_loss_distillation.teacher import Cache, _vocabulary

T, C, V = 12, 8, 11
TARGETS = torch.tensor([3, -100, 5, 0, 10, -100, -100, 2, 2, 7, 1, -100], dtype=torch.int32)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def top_of(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens, the logarithms of their probabilities, and that of all others."""
    q = (logits.double() / temperature).softmax(-1)
    values, ids = q.topk(k, -1)
    others = q.scatter(-1, ids, 0).sum(-1, keepdim=True)
    return ids.int(), torch.cat((values, others), -1).log().clamp(min=-80)


def exact(y: Tensor, labels: Tensor, ids: Tensor, log_probs: Tensor, **o: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The figures of rows, from all logits: buckets are sums of probabilities, and autograd does the rest."""
    p = (y / o["temperature"]).softmax(-1)
    student, k = p.gather(-1, ids.long()), ids.shape[-1]
    q = log_probs.to(y.dtype).exp()[:, : k if k == y.shape[-1] else k + 1]
    if q.shape[1] > k:
        student = torch.cat((student, p.scatter(-1, ids.long(), 0).sum(-1, keepdim=True)), -1)
    kl = (student * (student / q).log() if o["reverse"] else q * (q / student).log()).sum()
    ce = F.cross_entropy(y, labels.long(), reduction="sum")
    return (1 - o["weight"]) * ce + o["weight"] * o["temperature"] ** 2 * kl, ce, kl


OPTIONS: list[dict[str, Any]] = [
    {"chunks": 1, "weight": 1.0, "temperature": 1.0, "reverse": False},
    {"chunks": 3, "weight": 0.3, "temperature": 2.5, "reverse": False, "softcap": 1.5},
    {"chunks": 3, "weight": 0.7, "temperature": 0.5, "reverse": True},
    {"chunks": 1, "weight": 0.5, "temperature": 2.0, "reverse": True, "softcap": 1.5},
]


@pytest.mark.parametrize("k", [1, 4, V])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_outputs_and_gradients_are_those_of_plain_torch(options: dict[str, Any], k: int) -> None:
    x, w, scale = drawn(T, C).requires_grad_(), drawn(V, C, seed=1).requires_grad_(), torch.tensor(0.25).double()
    ids, log_probs = top_of(3 * drawn(T, V, seed=2), k, options["temperature"])
    y, labelled = x @ w.T, TARGETS >= 0
    cap = options.get("softcap", 0.0)
    y = cap * torch.tanh(y / cap) if cap else y
    expected = exact(y[labelled], TARGETS[labelled], ids[labelled], log_probs.float()[labelled], **options)
    given = (x.detach(), w.detach(), TARGETS, ids, log_probs.float(), scale)
    for ours, theirs in zip(lm_head_distill(*given, **options), expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach() * scale, rtol=1e-6, atol=1e-9)  # the teacher is fp32
    (expected[0] * scale).backward()
    *figures, dx, dw = lm_head_distill_grads(*given, wrt=(0, 1), **options)
    assert all(torch.equal(a, b) for a, b in zip(figures, lm_head_distill(*given, **options), strict=True))
    for ours, value in ((dx, x), (dw, w)):
        assert value.grad is not None
        torch.testing.assert_close(ours, value.grad, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_whole_vocabulary_gives_the_exact_divergence(reverse: bool) -> None:
    x, w, teacher = drawn(T, C), drawn(V, C, seed=1), 3 * drawn(T, V, seed=2)
    ids, log_probs = top_of(teacher, V, 1.0)
    options = {"chunks": 1, "weight": 1.0, "temperature": 1.0, "reverse": reverse}
    _, _, divergence = lm_head_distill(x, w, TARGETS, ids, log_probs.float(), torch.tensor(1.0).double(), **options)
    ours, theirs = ((z[TARGETS >= 0]).log_softmax(-1) for z in (x @ w.T, teacher))
    pair = (theirs, ours) if reverse else (ours, theirs)
    assert float(divergence) == pytest.approx(float(F.kl_div(*pair, log_target=True, reduction="sum")), rel=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_student_that_is_certain_has_finite_figures_and_gradients(reverse: bool) -> None:
    x, w = torch.tensor([[900.0], [-900.0]]), torch.tensor([[1.0], [0.5], [-1.0]])
    ids, log_probs = torch.tensor([[1], [1]], dtype=torch.int32), torch.tensor([[-0.1, -2.3], [0.0, -80.0]])
    options = {"chunks": 1, "weight": 0.5, "temperature": 1.0, "reverse": reverse, "wrt": (0, 1)}
    found = lm_head_distill_grads(x, w, torch.zeros(2).int(), ids, log_probs, torch.tensor(1.0), **options)
    assert all(bool(value.isfinite().all()) for value in found)


def test_references_fit_the_shape_rules_which_refuse_what_does_not_fit() -> None:
    ops = {op.kind: op for op in OPS}
    ids, log_probs = top_of(drawn(T, V), 4, 1.0)
    given = (drawn(T, C).float(), drawn(V, C).float(), TARGETS, ids, log_probs.float(), torch.tensor(0.5))
    options = OPTIONS[1]
    check_op(ops["lm_head_distill"], *given, **options)
    for wrt in ((0,), (0, 1)):
        check_op(ops["lm_head_distill_grads"], *given, wrt=wrt, **options)
    with pytest.raises(ProgramError, match=r"log_probs must be fp32 \[12, 5\]"):
        check_op(ops["lm_head_distill"], *given[:4], log_probs[:, 1:].float(), given[5], **options)


# ------------------------------------------------------------------------------------------------------ the whole loss

DOCUMENTS = packed_documents()
FLAT = [document for row in DOCUMENTS for document in row]
LABELS = sum(len(document) - 1 for document in FLAT)
VOCABULARY = tiny_config()["vocab_size"]
KEYS: dict[str, Any] = {"distillation_teacher": "a-model", "distillation_weight": 0.6}
KEYS |= {"distillation_temperature": 2.0, "distillation_top_k": 5}


def teacher_of(document: list[int], k: int, temperature: float) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logits = random_hf_model(tiny_config(), seed=3)(input_ids=torch.tensor(document)[None]).logits[0]
    return top_of(6 * logits, k, temperature)


def trained(
    keys: dict[str, Any], rows: list[list[list[int]]], program: str = "micro_first", **settings: Any
) -> tuple[PlannedModel, dict[str, float]]:
    o = DistillationOptions(**keys)
    model = PlannedModel(tiny_config(), len(rows), 24, loss=DISTILLATION, loss_options=o, lmhead_chunks=3, **settings)
    model.load(random_hf_model(tiny_config()).state_dict())
    model.write(rows, 1 / LABELS)
    columns = {name: model.buffers.persistent(value) for name, value in model.assembly.batch.columns.items()}
    for number, row in enumerate(rows):
        at = 24 * number
        for document in row:
            found = teacher_of(document, o.distillation_top_k, o.distillation_temperature)
            for column, numbers in zip(columns.values(), found, strict=True):
                column[at : at + len(document)] = numbers
            at += len(document)
    model.executor.run(program)
    held = "evaluation" if program == "evaluate" else "step"
    return model, {f.name: float(model.buffers.persistent(getattr(f, held))) for f in model.assembly.reported}


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_figures_and_every_gradient_are_those_of_plain_torch(kl: Any) -> None:
    keys = {**KEYS, "distillation_kl": kl}
    theirs = random_hf_model(tiny_config()).double()
    options = {"weight": 0.6, "temperature": 2.0, "reverse": kl == "reverse"}
    sums = torch.zeros(3, dtype=torch.float64)
    for document in FLAT:
        ids, log_probs = teacher_of(document, 5, 2.0)
        logits = theirs(input_ids=torch.tensor(document)[None]).logits[0, :-1]
        sums = sums + torch.stack(exact(logits, torch.tensor(document[1:]), ids[:-1], log_probs[:-1], **options))
    (sums[0] / LABELS).backward()
    model, found = trained(keys, DOCUMENTS)
    wanted = dict(zip(("loss", "cross_entropy", "divergence"), (sums.detach() / LABELS).tolist(), strict=True))
    assert found == pytest.approx(wanted, rel=1e-5)
    named = dict(theirs.named_parameters())
    for name, gradient in model.gradients.items():
        assert relative_error(gradient.double(), named[name].grad) <= 1e-5, name


def test_packed_rows_are_documents_alone_and_recomputation_keeps_the_bits() -> None:
    model, packed = trained(KEYS, DOCUMENTS)
    _, alone = trained(KEYS, [[document] for document in FLAT])
    assert alone == pytest.approx(packed, rel=1e-6)
    again, recomputed = trained(KEYS, DOCUMENTS, recompute=frozenset({"block"}))
    assert recomputed == packed
    assert all(torch.equal(g, model.gradients[name]) for name, g in again.gradients.items())
    assert trained(KEYS, DOCUMENTS, "evaluate")[1] == pytest.approx(packed, rel=1e-6)


def test_no_op_of_the_programs_holds_all_logits() -> None:
    model, _ = trained(KEYS, DOCUMENTS)
    micro = model.assembly.programs["micro_first"]
    assert not [v for op in micro.ops for v in op.outs if v.role == "act" and v.shape[-1:] == (VOCABULARY,)]


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"distillation_top_k: 98 is more than the vocabulary of the model, 97 tokens"
    ):
        trained({**KEYS, "distillation_top_k": 98}, DOCUMENTS)
    with pytest.raises(ConfigError, match="loss: distillation needs a teacher"):  # in a plan, which runs none
        trained({**KEYS, "distillation_teacher": ""}, DOCUMENTS)
    with pytest.raises(ValidationError, match="beside: a teacher in the program that trains is not built"):
        DistillationOptions(distillation_run_teacher="beside")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"vocab_size": 9, "vocab_size": 8}', '{"text_config": []}'])
def test_a_damaged_config_of_the_teacher_is_refused_by_its_name(tmp_path: Path, content: str) -> None:
    for name in ("model", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 97}')
    (tmp_path / "teacher" / "config.json").write_text(content)
    context = SimpleNamespace(options=SimpleNamespace(distillation_top_k=4), model_dir=tmp_path / "model")
    with pytest.raises(ConfigError, match=r"teacher/config\.json"):
        _vocabulary(context, tmp_path / "teacher")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", ""])
def test_a_damaged_manifest_is_damage_of_the_cache(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    assert str(tmp_path) in Cache(tmp_path, 3, 2, 97, {"format": 1}).damage()
