"""A language model without attention: each token sees itself alone. Small enough to read, large enough to learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.api import (
    BatchInputs,
    Builder,
    ConfigError,
    Head,
    HFTensor,
    Init,
    ModelDef,
    OpDef,
    OutSpec,
    WeightMap,
)

SQUARED_RELU = OpDef(
    kind="acme_squared_relu",
    infer=lambda ins, attrs: [OutSpec("squared_relu", ins[0].shape, ins[0].dtype)],
    reference="acme_surogate.reference:squared_relu",
    flops=lambda op: 2 * op.ins[0].size,
)
"""No `vjp`: the core differentiates the reference. A rule of one's own, and a kernel, can come later."""


@dataclass(frozen=True)
class MLPDims:
    """Sizes of the model, from its config.json."""

    vocab_size: int
    d_model: int
    n_layers: int
    max_positions: int


def dims(config: Mapping[str, Any]) -> MLPDims:
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    for key in keys:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ConfigError(f"{key}: must be a whole number of at least 1 (got {config.get(key)!r})")
    return MLPDims(*(config[key] for key in keys))


def build(b: Builder, d: MLPDims, batch: BatchInputs) -> Head:
    """x += down(squared_relu(up(x))) in every layer, then the norm that the LM head reads."""
    init = Init(kind="normal", std=0.02)
    x = b.apply("embedding", batch.tokens, b.param("embedding", (d.vocab_size, d.d_model), init))
    for i in range(d.n_layers):
        with b.block(i):
            up = b.apply("linear", x, b.param(f"layers.{i}.up", (4 * d.d_model, d.d_model), init), label="up")
            hidden = b.apply("acme_squared_relu", up)
            down = b.param(f"layers.{i}.down", (d.d_model, 4 * d.d_model), init)
            x = b.apply("add", x, b.apply("linear", hidden, down, label="mlp_out"), label="residual")
    norm = b.apply("rmsnorm", x, b.param("norm", (d.d_model,), Init(kind="ones")), eps=1e-6)
    head = b.param("lm_head", (d.vocab_size, d.d_model), init)
    return Head(norm, head)


def weights(d: MLPDims) -> Sequence[WeightMap]:
    """Every param is one tensor of the checkpoint, in the order of the forward pass."""
    shapes = {"embedding": (d.vocab_size, d.d_model)}
    for i in range(d.n_layers):
        shapes |= {f"layers.{i}.up": (4 * d.d_model, d.d_model), f"layers.{i}.down": (d.d_model, 4 * d.d_model)}
    shapes |= {"norm": (d.d_model,), "lm_head": (d.vocab_size, d.d_model)}
    return [WeightMap(name, (HFTensor(f"{name}.weight", shape),)) for name, shape in shapes.items()]


MLP = ModelDef(
    name="acme_mlp",
    summary="An MLP language model with squared ReLU",
    architectures=("AcmeMLPForCausalLM",),
    model_types=("acme_mlp",),
    dims=dims,
    build=build,
    weights=weights,
    in_transformers=False,
)
