"""On a GPU each op of a loss has a compiled kernel, whatever its options. Asks what plans ask, so it needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models.harness import tiny_config

from surogate import run
from surogate_core.assembly.resolve import unserved_ops

LOSSES = {
    "tokens": ["lora=false", "tokens_z_loss=1e-4", "tokens_weights=true tokens_label_smoothing=0.1"],
    "dpo": ["", "dpo_label_smoothing=0.1", "dpo_loss=hinge", "dpo_loss=ipo"],
    "kto": [""],
    "orpo": [""],
    "simpo": ["simpo_gamma=0.5"],
    "reward": ["", "lora=false reward_center=0.1"],
}
EXAMPLE = Path(__file__).parents[1] / "examples/tiny-qwen3"
DATASETS = {"tokens": "weighted", "kto": "labelled"}
CASES = [(loss, keys) for loss, options in LOSSES.items() for keys in options]


def unserved(folder: Path, loss: str, model: Path = EXAMPLE, keys: str = "") -> str:
    config = folder / "run.yaml"
    datasets = [{"path": "data.jsonl", "type": DATASETS.get(loss, "preference")}]
    given = {"model": str(model), "lora": True, "loss": loss, "datasets": datasets}
    config.write_text(json.dumps(given | {"sequence_len": 64, "output_dir": str(folder / "output")}))
    plan = run.plan(run.load(config, keys.split()), "h100")
    assert {"lm_head_tokens", "document_scores"} & plan.kernels.providers.keys()
    return unserved_ops(plan.kernels)


@pytest.mark.parametrize(("loss", "keys"), CASES)
def test_every_op_has_a_kernel(loss: str, keys: str, tmp_path: Path) -> None:
    assert unserved(tmp_path, loss, keys=keys) == ""


def test_so_has_that_of_a_model_that_caps_its_logits(tmp_path: Path) -> None:
    dims = {"head_dim": 64, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    config = tiny_config(model_type="gemma2", query_pre_attn_scalar=64, sliding_window=32, **dims)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_activation": "gelu_pytorch_tanh"}))
    assert unserved(tmp_path, "dpo", tmp_path) == ""
