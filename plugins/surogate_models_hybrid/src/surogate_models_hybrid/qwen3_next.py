"""Qwen3-Next: the layers of Qwen3.5 with experts; the projections of its linear layers are ordered by key heads.

`in_proj_qkvz` has, of each key head, the rows of q, k, its values and their gates; `in_proj_ba` those of b and a.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surogate_core.api import BatchInputs, Builder, Value, WeightMap
from surogate_models.api import ResidualStream, decoder, linear, linear_weights, read_int
from surogate_models_moe.api import (
    Router,
    metrics,
    mixture_or_mlp,
    mixture_weights,
    read_dense_layers,
    read_mixture,
    read_normalize,
)

from . import qwen3_5
from .qwen3_5 import QWEN3_5, HybridDims, mixer, mixer_weights
from .qwen3_5_moe import SHARED, HybridMixtureDims

_FURTHER = ("mtp.*",)
"""The layer that predicts further tokens. transformers ignores it."""


def dims(config: Mapping[str, Any]) -> HybridMixtureDims:
    """Read the sizes from a parsed `config.json`, as `qwen3_5.dims` does."""
    sizes = qwen3_5.dims({"intermediate_size": 5632, "num_key_value_heads": 2, **config})
    mixture = read_mixture(
        config,
        n_experts=512,
        k=10,
        d_expert=read_int(config, "moe_intermediate_size", default=512),
        router=Router(normalize=read_normalize(config, default=True)),
        d_shared=read_int(config, SHARED, default=512),
        shared_gated=True,
        reads=(SHARED,),
    )
    dense = read_dense_layers(config, sizes.n_layers, without="Qwen3.5")
    return HybridMixtureDims(**vars(sizes), mixture=mixture, dense=dense)


def projections(b: Builder, d: HybridDims, name: str, x: Value) -> tuple[Value, Value, Value]:
    """Emit the projections of a layer of the delta rule, of x [T, d_model]: -> [q; k; v], z, [b; a]."""
    qkvz = linear(b, d, x, f"{name}.qkvz", d.delta_rows + d.v_rows, label="qkv")
    ba = linear(b, d, x, f"{name}.ba", 2 * d.n_v_heads, label="qkv")
    qkv, z, ba = b.emit("split_key_heads", qkvz, ba, **d.delta)
    return qkv, z, ba


def projection_weights(d: HybridDims, name: str, module: str) -> list[WeightMap]:
    """Return the weight maps of `projections`. Those of b and a are precise, as in Qwen3.5."""
    (ba,) = linear_weights(f"{name}.ba", d.d_model, False, (f"{module}.in_proj_ba", 2 * d.n_v_heads))
    rows = d.delta_rows + d.v_rows
    return [
        *linear_weights(f"{name}.qkvz", d.d_model, False, (f"{module}.in_proj_qkvz", rows)),
        replace(ba, precise=True),
    ]


def block(b: Builder, d: HybridMixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + mixer(norm(x)), then x + mixture(norm(x)), or the MLP of a dense layer."""
    return mixture_or_mlp(b, d, batch, i, mixer(b, d, batch, i, stream, projections))


def block_weights(d: HybridMixtureDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`."""
    mixed = mixer_weights(d, name, source, projection_weights)
    return [*mixed, *mixture_weights(d, name, source, shared_expert="shared_expert")]


QWEN3_NEXT = replace(
    decoder(
        name="qwen3_next",
        summary="Qwen3-Next: gated delta rule, gated attention, 512 experts and a gated shared one",
        architecture="Qwen3NextForCausalLM",
        dims=dims,
        block=block,
        block_weights=block_weights,
        metrics=metrics,
    ),
    kept_tensors=lambda d: _FURTHER,
    may_lack=lambda d: _FURTHER,
    recompute=QWEN3_5.recompute,
)
