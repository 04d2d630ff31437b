"""A model for Surogate: a gated MLP on each token by itself, without attention"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder, ConfigError, Head, HFTensor, Init, ModelDef, WeightMap, provides

SUROGATE_API = {"models": 1}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, from its config.json. Core reads `vocab_size`, `n_layers` and `max_positions`."""

    vocab_size: int
    width: int
    n_layers: int
    max_positions: int


def sizes(config: Mapping[str, Any]) -> Sizes:
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    for key in keys:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ConfigError(f"{key}: must be a whole number of at least 1 (got {config.get(key)!r})")
    return Sizes(*(config[key] for key in keys))


def build(b: Builder, d: Sizes, batch: BatchInputs) -> Head:
    """Emit the forward pass up to the LM head. Core adds the loss, the backward pass, accumulation and the update."""
    init = Init(kind="normal", std=0.02)
    x = b.apply("embedding", batch.tokens, b.param("embedding", (d.vocab_size, d.width), init))
    for i in range(d.n_layers):
        with b.block(i):  # memory is planned, recomputed and offloaded by blocks
            norm = b.apply("rmsnorm", x, b.param(f"layers.{i}.norm", (d.width,), Init(kind="ones")), eps=1e-6)
            gate_up = b.param(f"layers.{i}.gate_up", (4 * d.width, d.width), init)
            hidden = b.apply("swiglu", b.apply("linear", norm, gate_up, label="gate_up"))
            down = b.apply("linear", hidden, b.param(f"layers.{i}.down", (d.width, 2 * d.width), init), label="mlp_out")
            x = b.apply("add", x, down, label="residual")
    norm = b.apply("rmsnorm", x, b.param("norm", (d.width,), Init(kind="ones")), eps=1e-6)
    head = b.param("lm_head", (d.vocab_size, d.width), init)
    return Head(norm, head)


def weights(d: Sizes) -> Sequence[WeightMap]:
    """Return the tensors of a checkpoint that make up each param, in the order of the forward pass."""

    def single(name: str, *shape: int) -> WeightMap:
        return WeightMap(name, (HFTensor(f"{name}.weight", shape),))

    maps = [single("embedding", d.vocab_size, d.width)]
    for i in range(d.n_layers):
        half = (2 * d.width, d.width)
        gate_up = tuple(HFTensor(f"layers.{i}.{name}.weight", half) for name in ("gate", "up"))  # one param of two
        maps += [single(f"layers.{i}.norm", d.width), WeightMap(f"layers.{i}.gate_up", gate_up)]
        maps += [single(f"layers.{i}.down", d.width, 2 * d.width)]
    return [*maps, single("norm", d.width), single("lm_head", d.vocab_size, d.width)]


surogate_models = provides(
    [
        ModelDef(
            name="acme_toy",
            summary="a gated MLP on each token",
            architectures=("acme_toy",),  # config.json names it
            model_types=("acme_toy",),
            dims=sizes,
            build=build,
            weights=weights,
            in_transformers=False,
        )
    ]
)
