"""Experts' weights that are decoded a few experts at a time: memory by plan, what auto chooses, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate import run
from surogate_core.api import ConfigError
from surogate_core.planning.plan import DECODED_BYTES, Plan

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss 20B with two layers and few tokens: 1.48 GiB of experts a layer in bf16."""
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 4096, "hidden_size": 2880}
    config |= {"intermediate_size": 2880, "num_hidden_layers": 2, "num_attention_heads": 64, "num_local_experts": 32}
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def planned(model: Path, **keys: Any) -> Plan:
    given = {"model": model, "sequence_len": 1024, "per_device_train_batch_size": 1, "lora": True, "recompute": True}
    given |= {"lora_target_parameters": "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"}
    given |= {"qlora_mxfp4": True, "output_dir": "out", **keys}
    path = model / "run.yaml"
    path.write_text("datasets: [{path: text.jsonl, type: text}]\n", encoding="utf-8")
    return run.plan(run.load(path, [f"{key}={value}" for key, value in given.items()]), "h100", 1)


def arenas(plan: Plan) -> dict[str, int]:
    return {name: arena.arena_bytes for name, arena in plan.assembly.memory.arenas.items()}


def test_no_program_has_more_than_some_of_a_weight(model: Path) -> None:
    whole, some = (arenas(planned(model, decoded_experts=most)) for most in (0, "256MiB"))
    assert whole["micro_first"] > 1.4 * GIB and whole["micro_first"] - some["micro_first"] > 0.5 * GIB


def test_copies_of_experts_in_fp8_are_made_in_parts_too(model: Path) -> None:
    keys = {"recipe": "fp8-hybrid", "deterministic": False}
    whole, some = (arenas(planned(model, **keys, decoded_experts=most)) for most in (0, "64MiB"))
    assert whole["calibrate_first"] - some["calibrate_first"] > 200 * MIB


@pytest.mark.parametrize(("most", "programs"), [(0, 3), ("1GiB", 3), ("256MiB", 6)])
def test_experts_are_encoded_in_parts_also_where_they_are_decoded_whole(
    model: Path, most: int | str, programs: int
) -> None:
    """gate_up in parts; the 506 MiB of down are few enough."""
    encoding = {name: size for name, size in arenas(planned(model, decoded_experts=most)).items() if "derive.0" in name}
    assert len(encoding) == programs and max(encoding.values()) <= (256 if programs == 6 else 512) * MIB


def test_auto_takes_it_where_the_run_does_not_fit_otherwise_and_nowhere_else(model: Path) -> None:
    whole = planned(model)
    assert whole.inputs.decoded_experts is None and whole.decoded_line == ""
    some = planned(model, decoded_experts="256MiB").report.device_bytes["total"]
    limit = f"{(some + 64 * MIB) // MIB}MiB"
    chosen = planned(model, device_memory_limit=limit)
    assert chosen.report.fits and chosen.inputs.decoded_experts == DECODED_BYTES
    assert chosen.decoded_line == "decoded_experts: at most 256 MiB of a weight at a time"
    assert not planned(model, device_memory_limit=limit, decoded_experts=0).report.fits


@pytest.mark.parametrize("keys", [{}, {"qlora_bnb": True}], ids=["bf16", "nf4"])
def test_a_run_that_cannot_decode_some_experts_is_refused(model: Path, keys: dict[str, Any]) -> None:
    message = "decoded_experts: no product of experts in this run reads weights that a weight format can decode a few"
    with pytest.raises(ConfigError, match=message):
        planned(model, qlora_mxfp4=False, **keys, decoded_experts="256MiB")


@pytest.mark.parametrize("value", ["-1", "some", "12"])
def test_a_value_that_is_no_size_is_refused(model: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="decoded_experts"):
        planned(model, decoded_experts=value)
