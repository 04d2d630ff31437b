"""Qwen3.5, mixtures, text: the layers of Qwen3.5 with experts, and a shared expert that each token opens by a sigmoid.

Checkpoints have a matrix for each expert and projection, as transformers writes them, or one tensor for all experts
of a layer, as they are published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from surogate_core.api import BatchInputs, Builder, WeightMap
from surogate_models.api import (
    ResidualStream,
    decoder,
    decoder_weights,
    invalid,
    outer,
    read_int,
)
from surogate_models_moe.api import (
    MixtureDims,
    Router,
    expert_weights,
    metrics,
    mixture_or_mlp,
    mixture_weights,
    read_mixture,
    read_normalize,
    stacked_expert_weights,
)

from . import qwen3_5
from .qwen3_5 import QWEN3_5, HybridDims, mixer, mixer_weights

SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, kw_only=True)
class HybridMixtureDims(HybridDims, MixtureDims):
    """Sizes of a model, all of whose layers have experts."""


def dims(config: Mapping[str, Any]) -> HybridMixtureDims:
    """Read the sizes from a parsed `config.json`, as `qwen3_5.dims` does."""
    if config.get("mlp_only_layers"):
        raise invalid(
            "mlp_only_layers", "transformers ignores it in this model; must be empty", config["mlp_only_layers"]
        )
    if not read_normalize(config, default=True):
        raise invalid("norm_topk_prob", "transformers ignores it in this model; must be true", False)
    d_expert = read_int(config, "moe_intermediate_size", default=512)
    sizes = qwen3_5.dims({"intermediate_size": d_expert, "num_key_value_heads": 2, **config})
    mixture = read_mixture(
        config,
        n_experts=256,
        d_expert=d_expert,
        router=Router(normalize=True),
        d_shared=read_int(config, SHARED, default=512),
        shared_gated=True,
        reads=(SHARED,),
    )
    return HybridMixtureDims(**vars(sizes), mixture=mixture)


def block(b: Builder, d: HybridMixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + mixer(norm(x)), then x + mixture(norm(x))."""
    return mixture_or_mlp(b, d, batch, i, mixer(b, d, batch, i, stream))


def block_weights(
    d: HybridMixtureDims, name: str, source: str, experts: Callable[..., list[WeightMap]] = expert_weights
) -> list[WeightMap]:
    """Return the weight maps of `block`. experts: see `mixture_weights`."""
    mixture = mixture_weights(d, name, source, shared_expert="shared_expert", experts=experts)
    return [*mixer_weights(d, name, source), *mixture]


QWEN3_5_MOE = replace(
    decoder(
        name="qwen3_5_moe_text",
        summary="Qwen3.5 with experts, text: gated delta rule, gated attention, a gated shared expert",
        architecture="Qwen3_5MoeForCausalLM",
        dims=dims,
        block=block,
        block_weights=block_weights,
        metrics=metrics,
    ),
    published_weights=lambda d: [decoder_weights(d, partial(block_weights, experts=stacked_expert_weights))],
    recompute=QWEN3_5.recompute,
)
QWEN3_5_MOE_OUTER = outer(
    QWEN3_5_MOE,
    name="qwen3_5_moe",
    summary="Qwen3.5 with experts, with a vision tower and a head for further tokens, which are kept",
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    text_types=("qwen3_5_moe_text",),
    towers={"vision_config": ("model.visual.*",)},
    may_lack=("mtp.*",),
    tied=False,
)
