"""Callbacks with the run in hand on a GPU: they change no bit, and read the weights of the step that has finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import documents, write_model
from safetensors.torch import load_file

import surogate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    "keys", [{}, {"zero_level": 3}, {"use_cuda_graphs": False}], ids=["graphs", "sharded", "eager"]
)
def test_a_callback_changes_no_bit_and_reads_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, keys: dict[str, Any]
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are not visible")
    if gpus == 1 and "zero_level" in keys:
        pytest.skip("weights are sharded over several")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {
        "model": str(write_model(tmp_path / "model", hidden_size=256, head_dim=64)),
        "from_scratch": True,
        "gpus": gpus,
        "sequence_len": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 3e-3,
        "validation_split_ratio": 0.1,
        "verify_outputs": False,
        "datasets": [{"text": text} for text in documents(300)],
        **keys,
    }
    kept: dict[int, dict[str, torch.Tensor]] = {}

    @surogate.every(3)
    def probe(run: surogate.ActiveRun) -> None:
        kept[run.step] = run.weights()
        run.log(held_out=run.evaluate().loss)
        run.save()

    looked = surogate.train(config, callback=probe, output_dir=str(tmp_path / "looked"), notice=print)
    alone = surogate.train(config, output_dir=str(tmp_path / "alone"), notice=print)
    assert looked.losses == alone.losses
    weights, others = (load_file(found.output_dir / "model.safetensors") for found in (looked, alone))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert kept[6].keys() == weights.keys() and all(torch.equal(kept[6][name], weights[name]) for name in weights)
    assert any(not torch.equal(kept[3][name], weights[name]) for name in weights)
