"""LongRoPE with packed rows: their length chooses the factors, a run says so, and verify compares like with like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from end_to_end.product import Workplace, write_model

from surogate import run
from surogate_core.machine.devices import cpu
from surogate_verify.verification import Extent, verify

ORIGINAL = 16
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 1.5 * i for i in range(8)]}
PHI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "tie_word_embeddings": False,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    "num_hidden_layers": 1,
}
LLAMA = PHI | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def long(here: Workplace) -> Workplace:
    write_model(here.root / "model", **PHI)
    return replace(here, config={**here.config, "datasets": None})


def lines(workplace: Workplace, **keys: Any) -> list[str]:
    planned = run.plan(run.load(workplace.write(**keys)), cpu())
    return [line for line in planned.overridden if "LongRoPE" in line]


@pytest.mark.parametrize("model", [PHI, LLAMA], ids=["phi3", "llama"])
def test_a_run_says_that_its_rows_choose_the_factors_of_short_documents(long: Workplace, model: dict[str, Any]) -> None:
    write_model(long.root / "model", **model)
    assert lines(long, sequence_len=ORIGINAL) == []
    (line,) = lines(long, sequence_len=64)
    assert f"sequence_len: 64 is above original_max_position_embeddings ({ORIGINAL})" in line
    assert f"transformers takes the short ones for texts of up to {ORIGINAL} tokens" in line


def test_a_model_without_long_factors_says_nothing(long: Workplace) -> None:
    write_model(long.root / "model", **PHI | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    assert lines(long, sequence_len=64) == []


@pytest.mark.parametrize("length", [ORIGINAL, 64])
def test_verify_asks_transformers_for_the_factors_of_the_rows(long: Workplace, length: int) -> None:
    notices: list[str] = []
    result = verify(long.write(sequence_len=64), [], Extent(rows=2, length=length), notice=notices.append)
    assert result.passed, result.first_wrong
    told = [line for line in notices if "shorter rows choose otherwise than those of the run" in line]
    assert len(told) == (length == ORIGINAL)
