"""`surogate verify` on the GPU compares the compiled kernels with transformers on the same device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from end_to_end.planted import write_random_model
from end_to_end.product import environment, make_workplace, write_model

from surogate_models.rope import Rope
from surogate_verify.verification import Extent, Verification, verify

from .harness import FAMILIES

pytestmark = pytest.mark.gpu


def verified(root: Path, family: str, monkeypatch: pytest.MonkeyPatch, *overrides: str, **options: Any) -> Verification:
    workplace = make_workplace(root, datasets=None)
    write_model(root / "model", **{**FAMILIES[family], "vocab_size": 2048, "rope_parameters": None})
    for name, value in environment(root).items():
        monkeypatch.setenv(name, value)
    config = workplace.write(sequence_len=512)
    return verify(config, overrides, Extent(**options), notice=lambda line: None)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = verified(tmp_path, family, monkeypatch, f"model_dtype={dtype}")
    for verdict in result.verdicts:
        rows = (f"{row.name} {row.error:.2e} {row.transformers_error:.2e} {row.allowed:.2e}" for row in verdict.rows)
        print("\n".join([verdict.precision, *rows]))
    assert result.needs.device > 0 and "CPU" not in result.device
    assert result.passed, result.first_wrong


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("key_bias", [30.0, 100.0])
def test_large_key_biases_pass(key_bias: float, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published Qwen2.5 models have such biases. The recipe's tests of attention measure the op alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = write_random_model(tmp_path / "model", "qwen2", key_bias=key_bias, head_dim=16, hidden_size=64)
    workplace = make_workplace(tmp_path / "run", datasets=None)
    changes = {"model": str(model), "from_scratch": False, "sequence_len": 64, "model_dtype": dtype}
    result = verify(workplace.write(**changes), [], notice=lambda line: None)
    assert result.passed, [(r.name, r.error, r.transformers_error) for v in result.verdicts for r in v.rows if not r.ok]


def test_whole_block_recomputation_and_chunks_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = verified(tmp_path, "qwen3", monkeypatch, "model_dtype=bf16", "recompute_block=true", rows=3, length=96)
    assert result.passed, result.first_wrong


def test_a_wrong_rope_theta_fails_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Rope.attrs.fget
    assert right is not None
    monkeypatch.setattr(Rope, "attrs", property(lambda rope: right(rope) | {"theta": 1.1 * rope.theta}))
    wrong = verified(tmp_path, "qwen3", monkeypatch, "model_dtype=bf16").first_wrong
    assert wrong is not None and wrong.name == "block 0"
