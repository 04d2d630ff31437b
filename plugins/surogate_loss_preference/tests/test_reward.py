"""`loss: reward` beside transformers' sequence classification: scores, gradients, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.groups import gradients, step
from models.harness import (
    MODELS,
    PlannedModel,
    as_stored,
    random_documents,
    random_hf_model,
    relative_error,
    tiny_config,
)
from transformers import AutoModelForSequenceClassification

from surogate_core.api import ConfigError
from surogate_core.testing.ops import check_op
from surogate_loss_preference.ops import OPS
from surogate_loss_preference.reward import REWARD, RewardOptions, scored

PADDING = 96
TOLERANCE = 1e-5


def documents() -> list[list[int]]:
    """Three pairs, whose documents end in no, one and two tokens that pad."""
    found = random_documents([7, 5, 6, 6, 4, 9], PADDING)
    found[1][-1:] = [PADDING]
    found[5][-2:] = [PADDING, PADDING]
    return found


def config_of(family: str) -> dict[str, Any]:
    """A config whose embeddings are tied in some families."""
    return tiny_config(
        model_type=family,
        num_labels=1,
        tie_word_embeddings=family in ("qwen3", "gemma3_text"),
        pad_token_id=PADDING,
        **({"sliding_window": 8, "layer_types": None, "rope_parameters": None} if "gemma" in family else {}),
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if "moe" in family else {}),
    )


def planned(config: dict[str, Any], center: float = 0.0, margins: bool = False, **settings: Any) -> PlannedModel:
    chosen = RewardOptions(reward_center=center, reward_margins=margins)
    model = scored(MODELS[config["model_type"]], config, Path("nowhere"), chosen)
    return PlannedModel(config, 3, 24, model=model, loss=REWARD, loss_options=chosen, **settings)


def rows(found: list[list[int]]) -> list[list[list[int]]]:
    return [found[:4], found[4:], []]


def expected(theirs: Any, found: list[list[int]], center: float) -> dict[str, torch.Tensor]:
    """The figures of TRL's RewardTrainer, of documents alone."""
    each = [theirs(input_ids=torch.tensor(document)[None]).logits[0, 0] for document in found]
    scores = torch.stack(each).view(-1, 2)
    h, total = scores[:, 0] - scores[:, 1], scores.sum(1)
    return {
        "loss": -F.logsigmoid(h).mean() + center * total.square().mean(),
        "rewards/chosen": scores[:, 0].mean(),
        "rewards/rejected": scores[:, 1].mean(),
        "margin": h.mean(),
        "accuracy": (h > 0).double().mean(),
        "mean_reward": scores.mean(),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_scores_and_every_gradient_are_those_of_transformers(family: str) -> None:
    config, found = config_of(family), documents()
    center = 0.05 if family == "qwen2" else 0.0
    theirs = random_hf_model(config, by=AutoModelForSequenceClassification)
    for module in theirs.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # which would leave out a gradient
    model = planned(config, center)
    model.load(theirs.state_dict())
    wanted = expected(theirs.double(), found, center)
    wanted["loss"].backward()
    ours = step(model, rows(found))
    figures = {name: float(value.detach()) for name, value in wanted.items()}
    assert ours == pytest.approx(figures, rel=TOLERANCE, abs=1e-6)
    stored = as_stored({name: parameter.grad for name, parameter in theirs.named_parameters()})
    assert model.gradients.keys() == stored.keys() and "score.weight" in stored
    for name, gradient in model.gradients.items():
        assert relative_error(gradient, stored[name]) <= TOLERANCE, name
    assert step(model, rows(found), "evaluate") == pytest.approx(ours, rel=1e-6, abs=1e-7)
    before = gradients(model)
    again = planned(config, center, recompute=frozenset({"block", "adapter"}))
    again.load(theirs.float().state_dict())
    step(again, rows(found))
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(again).items())


def test_margins_of_pairs_are_those_of_trl() -> None:
    config, found = config_of("llama"), documents()
    theirs = random_hf_model(config, by=AutoModelForSequenceClassification)
    model = planned(config, margins=True)
    model.load(theirs.state_dict())
    theirs.double()
    margins = torch.tensor([0.5, 0.0, 2.0])
    column = model.buffers.persistent(model.assembly.batch.columns["margin"])
    column[:] = 0
    column[:3] = margins[:, None].expand(3, 2)
    scores = torch.stack([theirs(input_ids=torch.tensor(document)[None]).logits[0, 0] for document in found])
    h = scores[0::2] - scores[1::2]
    loss = -F.logsigmoid(h - margins).mean()
    loss.backward()
    ours = step(model, rows(found))
    assert ours["loss"] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert ours["margin"] == pytest.approx(float(h.detach().mean()), rel=TOLERANCE, abs=1e-6)
    assert ours["loss"] > float(-F.logsigmoid(h.detach()).mean()) + 0.1
    for name, gradient in model.gradients.items():
        assert relative_error(gradient, theirs.get_parameter(name).grad) <= TOLERANCE, name


def test_padding_is_that_of_the_tokenizer_else_of_the_config_else_the_end_of_texts(tmp_path: Path) -> None:
    def padding(**config: Any) -> Any:
        saved = scored(MODELS["qwen3"], tiny_config(**config), tmp_path, RewardOptions()).saved(tiny_config(**config))
        return saved["pad_token_id"]

    assert padding(pad_token_id=None, eos_token_id=[5, 6]) == 5 and padding(pad_token_id=7) == 7
    assert padding(pad_token_id=None, eos_token_id=None) is None
    told = {"pad_token": {"content": "<pad>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    assert padding(pad_token_id=7) == 7
    for number, listed in (
        (9, {"model": {"vocab": {"<pad>": 9}}}),
        (10, {"added_tokens": [{"content": "<pad>", "id": 10}]}),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(listed))
        assert padding(pad_token_id=7) == number
    for number in (11, 1000):  # the last is no row of the embedding
        decoder = {"added_tokens_decoder": {str(number): {"content": "<pad>"}}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | decoder))
        assert padding(pad_token_id=7) == (11 if number == 11 else 7)


def test_models_that_cannot_have_the_head_are_refused() -> None:
    def dims(family: str, **config: Any) -> Any:
        found = tiny_config(model_type=family, **config)
        return scored(MODELS[family], found, Path("nowhere"), RewardOptions()).dims(found)

    with pytest.raises(ConfigError, match="transformers has no sequence classification of olmoe"):
        dims("olmoe")
    labels = {"id2label": {"0": "no", "1": "yes"}, "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(ConfigError, match="the model has 2 labels, and a reward model has one"):
        dims("llama", **labels)
    dims("llama", **labels | {"id2label": {"0": "LABEL_0"}})


def test_references_of_the_ops_fit_their_shape_rules() -> None:
    ops = {op.kind: op for op in OPS}
    x, weight, d = torch.randn(8, 3), torch.randn(1, 3), torch.randn(2, 2)
    tokens = torch.tensor([1, 2, 0, 0, 0, 5, 0, 9], dtype=torch.int32)
    groups = torch.tensor([[[0, 3], [3, 5]], [[0, 0], [0, 0]]], dtype=torch.int32)
    rest = (tokens, groups)
    scores, used = check_op(ops["document_scores"], x, weight, *rest, padding=0)
    assert used.tolist() == [[1, 1], [0, 0]]
    assert torch.allclose(scores, torch.tensor([[x[1] @ weight[0], x[3] @ weight[0]], [0, 0]]))
    (dx,) = check_op(ops["document_scores_dgrad"], d, weight, *rest, padding=0)
    assert dx.any(1).nonzero().flatten().tolist() == [1, 3] and torch.equal(dx[1], d[0, 0] * weight[0])
    (dw,) = check_op(ops["document_scores_wgrad"], d, x, *rest, padding=0)
    assert torch.allclose(dw[0], d[0, 0] * x[1] + d[0, 1] * x[3])


def test_a_damaged_file_of_the_tokenizer_is_refused_by_its_name(tmp_path: Path) -> None:
    model = scored(MODELS["qwen3"], tiny_config(), tmp_path, RewardOptions())
    for content in ("[" * 100_000, '{"pad_token": "a", "pad_token": "b"}', "[]", "{"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            model.saved(tiny_config())
