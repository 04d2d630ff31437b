"""A param in another dtype than its run's is stored as it is: in outputs, checkpoints, ranges, exports and merges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import scaled_family
import torch
from end_to_end.planted import write_random_model
from end_to_end.product import Workplace, losses
from safetensors.torch import load_file
from scaled_family import SCALE, scale_model
from torch import Tensor

from surogate import run
from surogate.checkpoints.hf import ModelExport
from surogate.checkpoints.model_ranges import join_ranges, write_ranges
from surogate_core.api import HFTensor, WeightMap
from surogate_core.runtime.pieces import Pieces


@pytest.fixture
def based(here: Workplace) -> Workplace:
    """A workplace whose base has weights in bf16 but for one tensor, whose param is fp32."""
    write_random_model(here.root / "model", "qwen3", layers=1)
    scale_model(here.root / "model")
    own = {"plugins": [scaled_family.__file__], "from_scratch": None, "model_dtype": "bf16", "eval_steps": 0}
    return replace(here, config={**here.config, **own, "max_steps": 2, "warmup_steps": 0})


def train(workplace: Workplace, name: str, **keys: object) -> Path:
    out = workplace.root / name
    run.train(run.load(workplace.write(output_dir=str(out), **keys)), notice=lambda line: None)
    return out


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def fits_into_bf16(tensor: Tensor) -> bool:
    return torch.equal(tensor, tensor.bfloat16().float())


def test_outputs_checkpoints_and_exports_hold_it_as_it_was_trained(based: Workplace) -> None:
    out = train(based, "straight", save_steps=1)
    run.export(out / "step_00000002", based.root / "exported")
    trained = load_file(out / "step_00000002/training_state/state-00001-of-00001.safetensors")[SCALE]
    assert not fits_into_bf16(trained) and not torch.equal(trained, weights(based.root / "model")[SCALE])
    for folder in (out, out / "step_00000002", based.root / "exported"):
        written = weights(folder)
        assert torch.equal(written.pop(SCALE), trained), folder
        assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    resumed = train(based, "resumed", resume_from_checkpoint=str(out / "step_00000001"))
    assert losses(resumed)[-1] == losses(out)[-1]
    assert all(torch.equal(tensor, weights(out)[name]) for name, tensor in weights(resumed).items())


def test_a_merged_model_has_the_bits_of_its_base(based: Workplace) -> None:
    out = train(based, "lora", lora=True, lora_rank=4, merge_adapter=True)
    run.merge(out / "adapter", based.root / "again")
    base = weights(based.root / "model")
    for folder in (out / "merged", based.root / "again"):
        merged = weights(folder)
        assert torch.equal(merged[SCALE], base[SCALE])
        assert {name: tensor.dtype for name, tensor in merged.items()} == {n: t.dtype for n, t in base.items()}


def test_ranges_that_processes_write_hold_it_too(tmp_path: Path) -> None:
    given = {"wide": torch.rand(8), "narrow": torch.rand(4, 2).bfloat16()}
    export = ModelExport(
        weights=[WeightMap(name, (HFTensor(name, tuple(tensor.shape)),)) for name, tensor in given.items()],
        params={name: Pieces.of(tensor) for name, tensor in given.items()},
        config={},
        source_dir=None,
        dtype="bf16",
        other_dtypes={"wide": "fp32"},
    )
    for name in ("ranges", "joined"):
        (tmp_path / name).mkdir()
    write_ranges(tmp_path / "ranges", export, 0)
    join_ranges(tmp_path / "joined", tmp_path / "ranges")
    joined = weights(tmp_path / "joined")
    assert all(
        torch.equal(joined[name], tensor) and joined[name].dtype == tensor.dtype for name, tensor in given.items()
    )
