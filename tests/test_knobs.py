"""The changes that are offered when a run does not fit: each, written into the config, saves what was promised."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core import run
from surogate_core.knobs import Knob, cheapest_knobs
from surogate_core.memory.devices import GIB
from surogate_core.prepare import Prepared

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 512},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
}
Plan = Callable[..., Prepared]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """(size, device, key=value ...) -> the planned run."""

    def planned(size: str, device: str, *overrides: str, **keys: Any) -> Prepared:
        model = tmp_path / size
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(BASE | SIZES[size]))
        config = tmp_path / f"{size}.yaml"
        config.write_text(json.dumps({"model": str(model), "sequence_len": 1024} | keys))
        return run.plan(run.load(config, list(overrides)), device)

    return planned


def overrides(knob: Knob) -> list[str]:
    """ "a: 1, b: 2" as a user would set it."""
    return [part.replace(": ", "=") for part in knob.change.split(", ")]


def check_exact(plan: Plan, size: str, device: str, knobs: list[Knob], before: Prepared, **keys: Any) -> None:
    for knob in knobs:
        after = plan(size, device, *overrides(knob), **keys)
        saved = before.report.device_bytes["total"] - after.report.device_bytes["total"]
        assert saved == knob.saves > 0, knob.change
        assert after.report.step.seconds - before.report.step.seconds == pytest.approx(knob.costs), knob.change
        assert after.report.fits is knob.enough, knob.change
        assert after.report.tokens == before.report.tokens, f"{knob.change}: the tokens of a step are the user's"


def check_sorted(knobs: list[Knob]) -> None:
    assert knobs == sorted(knobs, key=lambda knob: (not knob.enough, knob.costs, -knob.saves))


@pytest.mark.parametrize("size", ["8b", "32b"])
def test_three_exact_knobs_at_4k_on_an_h200_in_seconds(plan: Plan, size: str) -> None:
    """A full fine-tune with fp32 moments: one knob is enough for 8B, none is for 32B."""
    before = plan(size, "h200", sequence_len=4096)
    assert not before.report.fits
    start = time.process_time()
    knobs = cheapest_knobs(before)
    assert time.process_time() - start < 10
    assert len(knobs) == 3
    check_sorted(knobs)
    assert knobs[0].saves > 10 * GIB
    assert any(knob.enough for knob in knobs) is (size == "8b")
    check_exact(plan, size, "h200", knobs, before, sequence_len=4096)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"lmhead_chunks": 4},
    {"lmhead_chunks": 2048, "per_device_train_batch_size": 2},
    {"recompute_att": True, "recompute_rmsnorm": True},
    {"recompute_ffn": True, "gradient_accumulation_steps": 3},
    {"recompute_block": True, "param_grad_dtype": "bf16"},
    {"model_dtype": "fp32", "matmul_dtype": "bf16", "sample_packing": False},
]


@pytest.mark.parametrize("keys", SETTINGS, ids=[",".join(keys) or "defaults" for keys in SETTINGS])
def test_every_knob_is_exact(plan: Plan, keys: dict[str, Any]) -> None:
    before = plan("tiny", "l4", **keys)
    knobs = cheapest_knobs(before, count=100)
    check_sorted(knobs)
    assert knobs
    assert len({knob.change for knob in knobs}) == len(knobs)
    check_exact(plan, "tiny", "l4", knobs, before, **keys)
    told = " ".join(knob.change for knob in knobs)
    for key, value in keys.items():
        if value is True:
            assert f"{key}: true" not in told, "is set already"
    assert ("recompute_block" in told) is ("recompute_block" not in keys)
    assert ("param_grad_dtype" in told) is ("param_grad_dtype" not in keys)
    assert ("lmhead_chunks: 1024" in told) is (keys.get("lmhead_chunks") == 2048)


def test_a_batch_of_one_row_is_not_halved(plan: Plan) -> None:
    knobs = cheapest_knobs(plan("tiny", "l4", per_device_train_batch_size=1), count=100)
    assert knobs and not any("per_device_train_batch_size" in knob.change for knob in knobs)


def test_count_limits_the_knobs(plan: Plan) -> None:
    before = plan("tiny", "l4")
    everything = cheapest_knobs(before, count=100)
    assert [len(cheapest_knobs(before, count=n)) for n in (0, 1, 3)] == [0, 1, 3]
    assert cheapest_knobs(before) == everything[:3]
