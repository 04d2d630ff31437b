"""Layers with a gated delta rule, as Qwen3.5 and Qwen3-Next have them, in the form that llama.cpp expects.

Several heads of values share a head of keys. In files of transformers those of one head of keys stand together; for
Qwen3.5 value head i of llama.cpp reads key head i modulo their number, so its first ones are the first of each. In
files of Qwen3-Next a head of keys has queries, keys, values and gates together, which llama.cpp has apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LAYER = ".linear_attn."
TOGETHER = "in_proj_qkvz"


def taken(name: str, text: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what makes the file's tensor of a stored one; None: it is the same."""
    if LAYER not in name:
        return None
    table = NEXT if text.model_type == "qwen3_next" else MADE
    made = table.get(name.split(LAYER)[1].removesuffix(".weight"))
    return made and partial(made, text=text)


def parts_of(name: str, shape: tuple[int, ...], text: Any) -> dict[str, tuple[int, Callable[[Tensor], Tensor]]]:
    """Return the parts that llama.cpp has apart of a stored matrix: {end of the name: (rows, what it is of it)}."""
    if not name.endswith(f"{LAYER}{TOGETHER}.weight"):
        return {}
    gates = text.linear_num_value_heads * text.linear_value_head_dim
    rows = {"in_proj_qkv": shape[0] - gates, "in_proj_z": gates}
    return {part: (count, partial(apart, text=text, part=part)) for part, count in rows.items()}


def apart(x: Tensor, text: Any, part: str) -> Tensor:
    """Return queries, keys and values, or the gates, of all heads."""
    import torch

    keys, width = text.linear_num_key_heads, text.linear_key_head_dim
    values = text.linear_num_value_heads // keys * text.linear_value_head_dim
    *qkv, gates = x.unflatten(0, (keys, -1)).split([width, width, values, values], dim=1)
    return gates.flatten(0, 1) if part == "in_proj_z" else torch.cat([each.flatten(0, 1) for each in qkv])


def tiled(x: Tensor, text: Any, width: int, dim: int = 0) -> Tensor:
    """Return heads of values, each of so many rows, in the order of llama.cpp. dim: that of the heads."""
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    heads = x.unflatten(dim, (keys, values // keys, width))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def values(x: Tensor, text: Any) -> Tensor:
    return tiled(x, text, text.linear_value_head_dim)


def columns(x: Tensor, text: Any) -> Tensor:
    return tiled(x, text, text.linear_value_head_dim, dim=1)


def behind_keys(x: Tensor, text: Any) -> Tensor:
    """Return rows of queries and keys as they are, and those of values in the order of llama.cpp."""
    import torch

    first = 2 * text.linear_num_key_heads * text.linear_key_head_dim
    return torch.cat([x[:first], values(x[first:], text)])


def one_each(x: Tensor, text: Any) -> Tensor:
    return tiled(x, text, 1)


def decay(x: Tensor, text: Any) -> Tensor:
    """Return the factor of the step, of which files have the logarithm of the negative."""
    return -one_each(x.float(), text).exp()


def convolution(x: Tensor, text: Any) -> Tensor:
    return behind_keys(x[:, 0], text)


MADE: dict[str, Callable[..., Tensor]] = {
    "in_proj_qkv": behind_keys,
    "conv1d": convolution,
    "in_proj_z": values,
    "in_proj_a": one_each,
    "in_proj_b": one_each,
    "dt_bias": one_each,
    "A_log": decay,
    "out_proj": columns,
}
NEXT: dict[str, Callable[..., Tensor]] = {
    "conv1d": lambda x, text: x[:, 0],
    "A_log": lambda x, text: -x.float().exp(),
}
