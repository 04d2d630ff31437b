"""A checkpoint form for Surogate: matrices in 8 bits, with a scale for each row"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import CheckpointFormDef, ConfigError, HFTensor, Part, StoredTensor, provides

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"checkpoint_forms": 1}
SUROGATE_EXAMPLES = {"checkpoint form acme_toy": [{"quant_method": "acme_toy"}]}
ZERO = 128  # the code of 0


def matches(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "acme_toy"


def parts(tensor: HFTensor, config: Mapping[str, Any]) -> Sequence[Part]:
    """Name the tensors of the files that hold a matrix, with their shapes and dtypes."""
    if len(tensor.shape) != 2:
        raise ConfigError(f"is {list(tensor.shape)}; only matrices are stored in 8 bits.")
    scales = Part(f"{tensor.name}_scale", tensor.shape[:1], ("fp32",))
    return Part(tensor.name, tensor.shape, ("uint8",)), scales


def read(tensor: HFTensor, parts: Mapping[str, StoredTensor], rows: range, config: Mapping[str, Any]) -> Tensor:
    """Read rows of a matrix, of which no others are in memory."""
    codes = parts[tensor.name][rows.start : rows.stop].float()
    scales = parts[f"{tensor.name}_scale"][rows.start : rows.stop]
    return (codes - ZERO) * scales[:, None]


surogate_checkpoint_forms = provides(
    [
        CheckpointFormDef(
            name="acme_toy",
            summary="8 bits with a scale for each row",
            matches=matches,
            parts=parts,
            read=read,
        )
    ]
)
