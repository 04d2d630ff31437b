"""A whole model in float64, even where its code asks for float32 by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Keeps a float64 tensor in float64 where code would cast it to float32.

    The norms and the softmax of transformers compute in float32 whatever the dtype of the model ("x.to(torch.float32)",
    "softmax(x, dtype=torch.float32)"), so a model that is only moved to float64 is no more exact than these. Only casts
    of float64 tensors change: what starts in float32, such as the angles of RoPE, stays in float32.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [_wide(value) for value in args]
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
