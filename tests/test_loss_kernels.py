"""On a GPU each op of a loss has a compiled kernel, whatever its options. Asks what plans ask, so it needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surogate_core import run
from surogate_core.assembly.missing_kernels import unserved_ops

LOSSES = {
    "tokens": ["lora=false", "tokens_z_loss=1e-4", "tokens_weights=true tokens_label_smoothing=0.1"],
    "dpo": ["", "dpo_label_smoothing=0.1", "dpo_loss=hinge", "dpo_loss=ipo"],
    "kto": [""],
    "orpo": [""],
    "simpo": ["simpo_gamma=0.5"],
}
EXAMPLE = Path(__file__).parents[1] / "examples/tiny-qwen3"
DATASETS = {"tokens": "weighted", "kto": "labelled"}
CASES = [(loss, keys) for loss, options in LOSSES.items() for keys in options]


@pytest.mark.parametrize(("loss", "keys"), CASES)
def test_every_op_has_a_kernel(loss: str, keys: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    datasets = [{"path": "data.jsonl", "type": DATASETS.get(loss, "preference")}]
    given = {"model": str(EXAMPLE), "lora": True, "loss": loss, "datasets": datasets}
    config.write_text(json.dumps(given | {"sequence_len": 64, "output_dir": str(tmp_path / "output")}))
    plan = run.plan(run.load(config, keys.split()), "h100")
    assert "lm_head_tokens" in plan.kernels.providers
    assert unserved_ops(plan.kernels) == ""
