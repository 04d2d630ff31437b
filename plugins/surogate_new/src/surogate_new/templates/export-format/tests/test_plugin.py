from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from acme_plugin.plugin import check, stored, write
from torch import Tensor

from surogate_core.api import ConfigError, ExportContext, LinearModules

TENSORS: dict[str, Tensor] = {"a.weight": torch.arange(6.0).reshape(2, 3), "norm.weight": torch.ones(3)}


class Named:
    """A tensor with its name, as the context has it."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.shape, self.dtype, self.tensor = name, tuple(tensor.shape), tensor.dtype, tensor

    def __getitem__(self, rows: slice) -> Tensor:
        return self.tensor[rows]


def context(folder: Path, kind: str, tensors: dict[str, Tensor]) -> ExportContext:
    return ExportContext(
        source=folder,
        name="tiny",
        type=kind,
        config={"model_type": "tiny"},
        folder=folder,
        tensors={name: Named(name, tensor) for name, tensor in tensors.items()},
        linear=lambda: LinearModules(matrices={}, others=()),
        stops=[7],
        turn_ends=[],
        threads=1,
        model_dtype="bf16",
        options=None,
        progress=lambda done, total: None,
        notice=print,
        write_model=lambda folder, rewritten, config: None,
    )


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_the_file_has_every_tensor_where_the_header_says(kind: str, tmp_path: Path) -> None:
    write(context(tmp_path, kind, TENSORS), tmp_path)
    head, _, data = (tmp_path / "tiny.acme_toy").read_bytes().partition(b"\n")
    header = json.loads(head)
    assert header["stops"] == [7] and header["tensors"].keys() == TENSORS.keys()
    for name, place in header["tensors"].items():
        wanted = stored(TENSORS[name], kind)
        found = torch.frombuffer(bytearray(data), dtype=wanted.dtype, count=wanted.numel(), offset=place["at"])
        assert torch.equal(found.view(place["shape"]), wanted)


def test_five_dimensions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conv has 5 dimensions, at most 4. Use --format hf"):
        check(context(tmp_path, "f32", {"conv": torch.ones(1, 1, 1, 1, 1)}))
