"""The loss `reward`: a head of one score in the place of the LM head, trained on pairs (Bradley-Terry).

Checkpoints are those of transformers' sequence classification with one label. It reads the score at the last token of a
document that is not `pad_token_id`, and so does training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import (
    IMAGE_TEXT_TO_TEXT,
    BatchInputs,
    Builder,
    ConfigError,
    Head,
    HFTensor,
    Init,
    Loss,
    LossContext,
    LossDef,
    Metric,
    ModelDef,
    WeightMap,
    read_json_object,
)

from .losses import REWARDS, loss_of_groups
from .pairs import MARGIN

SCORE = "score.weight"
_LM_HEAD = "lm_head.weight"
_LM, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
_NAMED = {"Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}
"""Names of classes that do not follow the others."""

_WITHOUT = ("OlmoeForCausalLM",)
"""Architectures of which transformers has no sequence classification."""

_STD = 0.02
"""`initializer_range` where config.json has none, as in transformers."""


class RewardOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    reward_center: float = Field(
        0.0, ge=0, description="Weight of the square of the sum of both scores, which keeps scores around 0."
    )
    reward_margins: bool = Field(
        False,
        description="Ask for scores that differ by more than the margin of the pair, which data of type "
        "preference_with_margin have (Touvron et al. 2023).",
    )


def scored(model: ModelDef, base: Mapping[str, Any], folder: Path, options: RewardOptions) -> ModelDef:
    """Return the model with a head of one score. `base` and `folder`: config.json and folder of the run's base."""
    padding = cache(partial(_padding, folder, base))

    def with_score(maps: Sequence[WeightMap]) -> list[WeightMap]:
        trunk = [m for m in maps if not _is_lm_head(m)]
        width = next(m.tensors[0].shape[-1] for m in trunk if len(m.tensors[0].shape) == 2)  # of the embedding
        return [*trunk, WeightMap("score", (HFTensor(SCORE, (1, width)),), kind="head", new=True)]

    def build(b: Builder, dims: Any, batch: BatchInputs) -> Head:
        head = model.build(b, dims, batch)
        lm_head = [m.param for m in model.weights(dims) if _is_lm_head(m)]
        b.forget(value for value in b.declared if value.name in lm_head)
        init = Init(kind="normal", std=float(base.get("initializer_range", _STD)))
        score = b.param("score", (1, head.x.shape[1]), init)
        return replace(head, weight=score, attrs={"padding": padding()})

    return replace(
        model,
        architectures=(*model.architectures, *(_classifier(name) for name in model.architectures)),
        dims=lambda config: model.dims(_checked(model, config)),
        build=build,
        weights=lambda dims: with_score(model.weights(dims)),
        published_weights=lambda dims: [with_score(form) for form in model.published_weights(dims)],
        ignored_tensors=lambda dims: (*model.ignored_tensors(dims), _LM_HEAD),
        tied_copies=lambda dims: {},
        loaded_by=f"AutoModel{_CLASSIFIER}",
        loading={"num_labels": 1},
        saved=lambda config: _saved(model.saved(config), padding()),
    )


def _is_lm_head(m: WeightMap) -> bool:
    return any(tensor.name == _LM_HEAD for tensor in m.tensors)


def _classifier(architecture: str) -> str:
    if architecture.endswith(_CLASSIFIER):
        return architecture
    return _NAMED.get(architecture, architecture.removesuffix(_LM) + _CLASSIFIER)


def _checked(model: ModelDef, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise ConfigError for a model without such a class, and for a classifier of several labels."""
    if model.loaded_by == IMAGE_TEXT_TO_TEXT:
        raise ConfigError(f"loss: reward: is not built for models with towers, such as {model.name}. Use a text model")
    if not model.in_transformers or any(name in _WITHOUT for name in model.architectures):
        raise ConfigError(
            f"loss: reward: transformers has no sequence classification of {model.name}. Use another model"
        )
    named = config.get("architectures")
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if isinstance(named, list) and any(str(name).endswith(_CLASSIFIER) for name in named) and count != 1:
        raise ConfigError(f"id2label: the model has {count} labels, and a reward model has one (got {labels!r:.80})")
    return config


def _saved(config: Mapping[str, Any], padding: int) -> Mapping[str, Any]:
    named = config.get("architectures")
    return {
        **config,
        "architectures": [_classifier(str(name)) for name in named or ()],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": padding if padding >= 0 else None,
    }


def _padding(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the token that pads: of the tokenizer, else of config.json, else that which ends texts, as TRL does.

    -1 if none is known, as in a plan, whose folder may lack the tokenizer.
    """
    eos = config.get("eos_token_id")
    ids = (_tokenizer_padding(folder), config.get("pad_token_id"), *(eos if isinstance(eos, list) else [eos]))
    return next((i for i in ids if isinstance(i, int) and 0 <= i < config["vocab_size"]), -1)


def _tokenizer_padding(folder: Path) -> int | None:
    """Return the id of the tokenizer's `pad_token`, from its files."""
    told = _read(folder / "tokenizer_config.json")
    token = told.get("pad_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(token, str):
        return None
    for number, added in told.get("added_tokens_decoder", {}).items():
        if added["content"] == token:
            return int(number)
    whole = _read(folder / "tokenizer.json")
    listed = {added["content"]: int(added["id"]) for added in whole.get("added_tokens", ())}
    vocabulary = whole.get("model", {}).get("vocab")
    return listed.get(token, vocabulary.get(token) if isinstance(vocabulary, Mapping) else None)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_json_object(path)


def _build(context: LossContext[RewardOptions]) -> Loss:
    b, batch, head = context.builder, context.batch, context.head
    assert batch.groups is not None and batch.group_scale is not None, "the loss asks for groups"
    scores, used = b.emit(
        "document_scores", head.x, head.weight, batch.tokens, batch.groups, label=("logits", "used"), **head.attrs
    )
    attrs: dict[str, Any] = {"form": "sigmoid", "beta": 1.0, "center": context.options.reward_center}
    margins = [batch.columns[MARGIN.name]] if context.options.reward_margins else []
    attrs |= {"margined": True} if margins else {}
    values = b.emit("pair_loss", scores, used, batch.group_scale, *margins, **attrs)
    loss = loss_of_groups(values, (*REWARDS[:2], "margin", "accuracy"))
    return replace(loss, metrics=[*loss.metrics, Metric("mean_reward", values[-1], "group", of=_mean_score)])


def _mean_score(figures: Any) -> float:
    """Return the mean over both answers of the pairs."""
    return float(figures[0] + figures[1]) / 2


def _reference_loss(scores: Any, options: RewardOptions) -> Any:
    """Return the loss of the scores of both answers, [2, 1]."""
    import torch.nn.functional as F

    return options.reward_center * scores.sum().square() - F.logsigmoid(scores[0] - scores[1]).sum()


REWARD = LossDef(
    name="reward",
    summary="a reward model: a head of one score in the place of the LM head, trained on pairs",
    options=RewardOptions,
    model=scored,
    build=_build,
    columns=lambda options: [MARGIN] if options.reward_margins else [],
    group_size=2,
    reference_loss=_reference_loss,
)
