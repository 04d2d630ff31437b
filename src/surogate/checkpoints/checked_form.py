"""Checks what a weight format writes to checkpoints and reads from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import CheckpointForm, HFTensor, WeightFormatDef
from surogate_core.errors import ConfigError


@dataclass(frozen=True)
class CheckedForm:
    """The checkpoint form of a weight format, with results that are checked. Errors name the format's plugin."""

    format: WeightFormatDef
    form: CheckpointForm
    options: Any

    def parts(self, tensor: str) -> Sequence[str]:
        return self.form.parts(tensor, self.options)

    def config(self, kept: Sequence[str]) -> Mapping[str, Any]:
        """Return the config of a checkpoint, which the format itself accepts."""
        config = self.form.config(kept, self.options)
        if not self.form.matches(config):
            raise self.format.failed("checkpoints.matches", "refuses the config that checkpoints.config returns")
        try:
            self.form.check(config, self.options)
        except ConfigError as error:
            raise self.format.failed(
                "checkpoints.check", f"refuses the config that checkpoints.config returns: {error}"
            ) from error
        return config

    def save(self, tensor: HFTensor, states: Sequence[Tensor], dtype: str) -> Mapping[str, Tensor]:
        """Return the parts of a matrix, from which `load` makes its states again."""
        parts: Mapping[str, Tensor] = self.form.save(tensor, states, dtype, self.options)
        names = self.parts(tensor.name)
        if set(parts) != set(names) or (tensor.name in parts) == self.form.stacked:
            raise self.format.failed(
                "checkpoints.save",
                f"returned {', '.join(sorted(parts))} for {tensor.name}, expected what checkpoints.parts names, "
                f"{', '.join(sorted(names))}, and {tensor.name} {'not ' if self.form.stacked else ''}among them",
            )
        for index, (again, state) in enumerate(zip(self.load(tensor, parts, states), states, strict=False)):
            if not torch.equal(_bytes(again), _bytes(state)):
                raise self.format.failed(
                    "checkpoints.load", f"state {index} of {tensor.name} is not what checkpoints.save was given"
                )
        return parts

    def load(self, tensor: HFTensor, parts: Mapping[str, Tensor], places: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the first states of a matrix. They have the dtypes of `places`, and their sizes but for the first.

        places  the states of the matrix, or of several whose states are concatenated
        """
        states: Sequence[Tensor] = self.form.load(tensor, parts, self.options)
        if not 0 < len(states) <= len(places):
            raise self.format.failed(
                "checkpoints.load",
                f"returned {len(states)} states of {tensor.name}, expected the first of its {len(places)}",
            )
        for index, (state, place) in enumerate(zip(states, places, strict=False)):
            fits = isinstance(state, Tensor) and (state.dtype, state.shape[1:]) == (place.dtype, place.shape[1:])
            if not fits or len(state.shape) != len(place.shape) or len(state) > len(place):
                raise self.format.failed(
                    "checkpoints.load",
                    f"returned {_described(state)} for state {index} of {tensor.name}, expected {_described(place)}",
                )
        return states


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _described(state: object) -> str:
    if not isinstance(state, Tensor):
        return f"a {type(state).__name__}"
    return f"{str(state.dtype).removeprefix('torch.')} {list(state.shape)}"
