"""Whole runs in row tiles: formats of the base, recipes, losses, packed documents, and a run that is resumed.

A row of 512 tokens stands for a long one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.planted import write_random_model
from end_to_end.product import documents, environment, write_jsonl
from safetensors.torch import load_file

from surogate import run
from surogate_core.program.passes import sum_in_blocks
from surogate_lora import gradients

Trained = tuple[list[float], dict[str, torch.Tensor]]
TILED: dict[str, Any] = {"row_tiles": 128, "recompute": "true", "offload_residual": True}


@pytest.fixture(autouse=True)
def rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MANY_ROWS", 128)
    monkeypatch.setattr(sum_in_blocks, "BLOCK", 128)
    monkeypatch.setattr(sum_in_blocks, "SMALL", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiled")
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    config = write_random_model(place / "model", "qwen3", layers=4, **sizes) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    write_jsonl(place / "text.jsonl", documents(400, longest=700))  # some are longer than a tile
    rows = [{"prompt": "to be", "chosen": text, "rejected": text[::-1]} for text in documents(60)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def settings(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "lora": True,
        "lora_rank": 8,
        "datasets": [{"path": str(folder / "text.jsonl"), "type": "text"}],
        "sequence_len": 512,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "eval_steps": 0,
        "host_memory_limit": "1GiB",  # what the machine has does not matter
        "verify_outputs": False,
        "output_dir": str(folder / name),
        **keys,
    }


def train(folder: Path, name: str, **keys: Any) -> Trained:
    run.train(run.load(settings(folder, name, **keys)), notice=lambda line: None)
    return trained(folder / name)


def trained(out: Path) -> Trained:
    """Return the losses of the steps that a run has recorded, and its adapter."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["log"] == "step"]
    return losses, load_file(out / "adapter/adapter_model.safetensors")


@pytest.fixture(scope="module")
def untiled(folder: Path) -> Callable[..., Trained]:
    known: dict[str, Trained] = {}

    def result(**keys: Any) -> Trained:
        if str(keys) not in known:
            known[str(keys)] = train(folder, f"untiled{len(known)}", row_tiles=0, recompute="false", **keys)
        return known[str(keys)]

    return result


def check_same(one: Trained, other: Trained) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys() and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


PAIRS: dict[str, Any] = {"type": "preference", "text_as": "text", "prompt_field": "prompt"}


@pytest.mark.parametrize(
    "keys",
    [
        {"recipe": "fp8-hybrid"},
        pytest.param({"recipe": "nvfp4"}, marks=pytest.mark.slow),
        pytest.param({"qlora_bnb": True}, marks=pytest.mark.slow),
        pytest.param({"qlora_fp8": True, "recipe": "fp8-hybrid"}, marks=pytest.mark.slow),
        pytest.param({"qlora_fp4": True}, marks=pytest.mark.slow),
        pytest.param({"qlora_fp4": True, "recipe": "nvfp4"}, marks=pytest.mark.slow),
        {"loss": "dpo", "datasets": [PAIRS]},
        pytest.param({"loss": "orpo", "datasets": [PAIRS]}, marks=pytest.mark.slow),
        pytest.param({"lora_dropout": 0.1}, marks=pytest.mark.slow),
    ],
    ids=lambda keys: " ".join(f"{key}" if value is True else str(value)[:10] for key, value in keys.items()),
)
def test_a_tiled_run_has_the_bits_of_the_whole_one(
    keys: dict[str, Any], folder: Path, untiled: Callable[..., Trained]
) -> None:
    if "datasets" in keys:
        keys = keys | {"datasets": [PAIRS | {"path": str(folder / "pairs.jsonl")}]}
    check_same(train(folder, "tiled", **TILED, **keys, overwrite_output_dir=True), untiled(**keys))


def test_a_run_in_pairs_of_blocks_has_the_bits_too(folder: Path, untiled: Callable[..., Trained]) -> None:
    keys = {"recipe": "fp8-hybrid"}
    check_same(train(folder, "pairs", **TILED, recompute_pairs=True, **keys), untiled(**keys))


def test_a_run_that_is_resumed_in_other_tiles_ends_with_the_same_bits(
    folder: Path, untiled: Callable[..., Trained]
) -> None:
    keys = {"recipe": "fp8-hybrid"}
    train(folder, "resumed", **TILED, **keys, save_steps=1, save_total_limit=0)
    first = folder / "resumed/step_00000001"
    again = train(folder, "again", **TILED | {"row_tiles": 256}, **keys, resume_from_checkpoint=str(first))
    assert again[0] == untiled(**keys)[0][1:]
    check_same((again[0], again[1]), (untiled(**keys)[0][1:], untiled(**keys)[1]))


SCRIPT = """
import json, os, signal, sys
import surogate
from surogate_core.program.passes import sum_in_blocks
from surogate_lora import gradients

gradients.MANY_ROWS, sum_in_blocks.BLOCK, sum_in_blocks.SMALL = 128, 128, 0

def kill(report):
    if report.step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

surogate.train(json.loads(sys.argv[1]), callback=kill)
"""


@pytest.mark.slow
def test_a_tiled_run_that_is_killed_and_resumed_ends_with_the_bits_of_the_whole_one(
    folder: Path, untiled: Callable[..., Trained]
) -> None:
    """Killed by SIGKILL a step behind a checkpoint, resumed in other tiles."""
    keys: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "save_total_limit": 0}
    whole = untiled(**keys)
    name = "killed"

    def script(kill_at: int, **more: Any) -> subprocess.CompletedProcess[str]:
        given = json.dumps(settings(folder, name, **TILED | keys | more))
        command = [sys.executable, "-c", SCRIPT, given, str(kill_at)]
        return subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False)

    killed = script(kill_at=3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = script(kill_at=0, row_tiles=256, resume_from_checkpoint=True)
    assert again.returncode == 0 and "resuming from" in again.stdout, again.stderr
    check_same(trained(folder / name), whole)
