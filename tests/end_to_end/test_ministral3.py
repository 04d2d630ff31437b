"""Ministral 3 as transformers saves it, in rows beyond the original context: trained, saved and verified."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from end_to_end.product import MODEL_CONFIG, Workplace, write_model
from transformers import AutoModelForCausalLM, Ministral3Config, Ministral3ForCausalLM

from surogate import run
from surogate_verify.verification import Extent, verify

ROPE: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@pytest.fixture
def saved(here: Workplace) -> Workplace:
    """A workplace whose model transformers has drawn and saved."""
    sizes = {key: value for key, value in MODEL_CONFIG.items() if key not in ("architectures", "model_type", "dtype")}
    config = Ministral3Config(**sizes | {"max_position_embeddings": 256, "rope_parameters": dict(ROPE)})
    torch.manual_seed(0)
    folder = write_model(here.root / "model")
    Ministral3ForCausalLM(config).save_pretrained(folder)
    return replace(here, config={**here.config, "from_scratch": None, "sequence_len": 128})


def test_a_run_trains_a_saved_model_which_transformers_loads_and_verify_passes(saved: Workplace) -> None:
    config = saved.write(max_steps=1, warmup_steps=0, eval_steps=0)
    run.train(run.load(config), notice=lambda line: None)
    assert json.loads((saved.out / "config.json").read_text())["rope_parameters"] == {**ROPE, "rope_type": "yarn"}
    assert isinstance(AutoModelForCausalLM.from_pretrained(saved.out), Ministral3ForCausalLM)
    result = verify(config, [], Extent(rows=2, length=128), notice=lambda line: None)
    assert result.passed, result.first_wrong


def test_verify_keeps_the_factor_of_queries_beside_another_scaling(saved: Workplace) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    result = verify(saved.write(rope_scaling=scaling), [], Extent(rows=2, length=128), notice=lambda line: None)
    assert result.passed, result.first_wrong
