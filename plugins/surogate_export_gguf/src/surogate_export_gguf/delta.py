"""Layers with a gated delta rule, as Qwen3.5 has them, in the form that llama.cpp expects.

Several heads of values share a head of keys. In files of transformers those of one head of keys stand together; value
head i of llama.cpp reads key head i modulo their number, so its first ones are the first of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LAYER = ".linear_attn."


def taken(name: str, text: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what makes the file's tensor of a stored one; None: it is the same."""
    if LAYER not in name:
        return None
    made = MADE.get(name.split(LAYER)[1].removesuffix(".weight"))
    return made and partial(made, text=text)


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
