"""A model for the example: an MLP on each token by itself, with the op of this package. Its file is a plugin too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder, Head, HFTensor, Init, ModelDef, WeightMap, provides

SUROGATE_API = {"models": 1}


@dataclass(frozen=True)
class Sizes:
    vocab_size: int
    width: int
    n_layers: int = 1
    max_positions: int = 256


def sizes(config: Mapping[str, Any]) -> Sizes:
    return Sizes(config["vocab_size"], config["hidden_size"])


def shapes(d: Sizes) -> Mapping[str, tuple[int, ...]]:
    wide, narrow = (4 * d.width, d.width), (d.width, 4 * d.width)
    return {"embedding": (d.vocab_size, d.width), "up": wide, "down": narrow, "head": (d.vocab_size, d.width)}


def build(b: Builder, d: Sizes, batch: BatchInputs) -> Head:
    params = {name: b.param(name, shape, Init(kind="normal", std=0.1)) for name, shape in shapes(d).items()}
    x = b.apply("embedding", batch.tokens, params["embedding"])
    x = b.apply("linear", b.apply("acme_toy", b.apply("linear", x, params["up"])), params["down"])
    return Head(x, params["head"])


def weights(d: Sizes) -> Sequence[WeightMap]:
    return [WeightMap(name, (HFTensor(f"{name}.weight", shape),)) for name, shape in shapes(d).items()]


surogate_models = provides(
    [
        ModelDef(
            name="acme_toy_model",
            summary="an MLP for the example of acme-plugin",
            architectures=("acme_toy_model",),
            model_types=("acme_toy_model",),
            dims=sizes,
            build=build,
            weights=weights,
            in_transformers=False,
        )
    ]
)
