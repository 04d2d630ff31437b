"""Errors planted in one block of a model, forward and backward, and random models to plant them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from end_to_end.product import write_model
from torch import Tensor

from surogate_core.api import Head, OpDef, OutSpec, Value
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import Plugin, Provided
from surogate_core.plugins.registry import Registry
from surogate_core.program.builder import Builder
from surogate_models.ops import OPS
from surogate_models.reference import rope

BLOCK = 1
"""Where errors are planted: the second of three blocks."""

# ------------------------------------------------------------------------------------------------------------- models


def write_random_model(
    directory: Path,
    family: str,
    seed: int = 0,
    *,
    key_bias: float = 0.1,
    eps: float = 1e-6,
    layers: int = 3,
    hidden_size: int = 48,
    head_dim: int = 12,
    intermediate_size: int = 80,
) -> Path:
    """Write transformers' model of a family ("qwen2", "qwen3", "llama", "olmo2", "gemma2") with random weights.

    Norm weights are around 1. Biases are nonzero; those of the keys have standard deviation `key_bias`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "olmo2": "Olmo2", "gemma2": "Gemma2"}[family]
    write_model(
        directory,
        architectures=[f"{architecture}ForCausalLM"],
        model_type=family,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        head_dim=head_dim,
        attention_bias=family not in ("qwen3", "gemma2"),
        tie_word_embeddings=False,
        initializer_range=0.05,
        rms_norm_eps=eps,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("k_proj.bias"):
                parameter.normal_(0, key_bias)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    given = json.loads((directory / "config.json").read_text())
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(given))
    return directory


# ------------------------------------------------------------------------------------------------------------- errors


def wrong_eps(kind: str, ins: tuple[Value, ...], attrs: dict[str, Any]) -> dict[str, Any]:
    """Multiply the eps of the block's norms by ten."""
    return attrs | {"eps": 10 * attrs["eps"]} if "eps" in attrs else attrs


class Planting:
    """A builder that plants an error in BLOCK and forwards everything else unchanged.

    attrs: (kind, inputs, attributes) -> attributes of an op. after: kind of op -> function (builder, output,
    attributes) -> what is read in place of its first output.
    """

    def __init__(
        self,
        builder: Builder,
        attrs: Callable[..., dict[str, Any]] | None = None,
        after: dict[str, Callable[..., Value]] | None = None,
    ) -> None:
        self._builder = builder
        self._attrs = attrs
        self._after = after or {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def emit(self, kind: str, *ins: Value, **given: Any) -> tuple[Value, ...]:
        if self._builder._block != BLOCK:
            return self._builder.emit(kind, *ins, **given)
        attrs = self._attrs(kind, ins, given) if self._attrs else given
        outs = self._builder.emit(kind, *ins, **attrs)
        if kind in self._after:
            outs = (self._after[kind](self._builder, outs[0], attrs), *outs[1:])
        return outs

    def apply(self, kind: str, *ins: Value, **given: Any) -> Value:
        return self.emit(kind, *ins, **given)[0]


def swapped(b: Builder, out: Value, attrs: dict[str, Any]) -> Value:
    return b.apply("test_swap_heads", out, head_dim=attrs["head_dim"])


def turned(b: Builder, out: Value, attrs: dict[str, Any]) -> Value:
    kept = ("n_heads", "n_kv_heads", "head_dim", "theta", "scaling", "attention_factor")
    return b.apply("test_turn_queries", out, **{name: attrs[name] for name in kept if name in attrs})


def swap_heads(x: Tensor, *, head_dim: int) -> Tensor:
    """Swap the first two heads."""
    first, second, rest = x[:, :head_dim], x[:, head_dim : 2 * head_dim], x[:, 2 * head_dim :]
    return torch.cat((second, first, rest), dim=1)


def turn_queries(qkv: Tensor, *, n_heads: int, n_kv_heads: int, head_dim: int, **attrs: Any) -> Tensor:
    """Rotate queries by one position more than keys. Rotating both by one would have no effect."""
    width = n_heads * head_dim
    ones = torch.ones(qkv.shape[0], dtype=torch.int32)
    q = rope(qkv[:, :width], ones, n_heads=n_heads, n_kv_heads=0, head_dim=head_dim, **attrs)
    return torch.cat((q, qkv[:, width:]), dim=1)


_QUERIES = {name: of for op in OPS if op.kind == "rope" for name, of in op.attrs.items()}

OPS = [
    OpDef(
        kind=f"test_{function}",
        infer=lambda ins, attrs: [OutSpec("planted", ins[0].shape, ins[0].dtype)],
        attrs=attrs,
        reference=f"{__name__}:{function}",
    )
    for function, attrs in (("swap_heads", {"head_dim": int}), ("turn_queries", _QUERIES))
]

ERRORS: dict[str, dict[str, Any]] = {
    "wrong eps": {"attrs": wrong_eps},
    "swapped head": {"after": {"attention": swapped}},
    "RoPE off by one": {"after": {"rope": turned, "qk_norm_rope": turned}},
}


def plant(given: PlanInputs, error: str) -> PlanInputs:
    """Return the same plan inputs with an error planted in the model."""
    right = given.model.build

    def build(b: Builder, dims: Any, batch: Any) -> Head:
        return right(Planting(b, **ERRORS[error]), dims, batch)  # type: ignore[arg-type]

    return replace(given, model=replace(given.model, build=build))


def registry_for_tests() -> Registry:
    """Return a registry of the installed plugins and the ops of the planted errors."""
    installed = load_registry()
    plugin = Plugin("planted", "planted", "0", __name__)
    own = [Provided("op", op.kind, op, plugin) for op in OPS]
    return Registry([*installed.plugins, plugin], [*installed.provided, *own], installed.diagnose)
