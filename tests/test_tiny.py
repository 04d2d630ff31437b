"""Everything once, in seconds: discover, plan, train, evaluate, save, export, train on from what was exported."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surogate import run
from surogate.cli.app import app

TOKENIZER = Path(__file__).parent.parent / "examples/tiny-qwen3"

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

LINES = ["to be or not to be", "all the world is a stage", "brevity is the soul of wit", "what is past is prologue"]

STEPS = 12


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run.yaml of bf16 weights, bf16 gradients, recomputation, accumulation, evaluation and checkpoints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, model / name)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text("\n\n".join(LINES * 60))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
model: {model}
from_scratch: true
model_dtype: bf16
master_dtype: fp32
param_grad_dtype: bf16
output_dir: {tmp_path / "out"}
datasets: [{{path: {tmp_path / "text.txt"}, type: text}}]
validation_split_ratio: 0.1
sequence_len: 32
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_steps: {STEPS}
learning_rate: 1e-2
warmup_steps: 2
max_grad_norm: 1.0
recompute_block: true
lmhead_chunks: 2
eval_steps: 6
save_steps: 6
"""
    )
    return path


@pytest.mark.usefixtures("pictures")
def test_everything_once(config: Path) -> None:
    invoke = CliRunner().invoke
    listed = invoke(app, ["plugins"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in ("qwen3", "bf16", "adamw"))

    planned = invoke(app, ["plan", str(config), "--json"])
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout)
    assert plan["fits"]
    assert plan["device_bytes"]["total"] == sum(v for k, v in plan["device_bytes"].items() if k != "total")

    trained = invoke(app, ["train", str(config)])
    assert trained.exit_code == 0, trained.output
    out = config.parent / "out"
    steps = _metrics(out, "step")
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    assert abs(steps[0]["loss"] - math.log(CONFIG["vocab_size"])) < 0.3  # type: ignore[call-overload]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert [m["step"] for m in _metrics(out, "eval")][-1] == STEPS
    assert {"step_00000006", "step_00000012"} <= {p.name for p in out.iterdir()}
    for name in ("model.safetensors", "config.json", "tokenizer.json", "run.yaml", "loss.png"):
        assert (out / name).stat().st_size > 0, name
    _transformers_agrees(out, config, _metrics(out, "eval")[-1]["loss"])


def _metrics(out: Path, log: str) -> list[dict[str, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["log"] == log]


def _transformers_agrees(out: Path, config: Path, loss: float) -> None:
    """What was exported is what was trained: training on from it without a learning rate has the same eval loss."""
    overrides = [
        f"model={out}",
        "from_scratch=false",
        "max_steps=1",
        "warmup_steps=0",
        "learning_rate=0",
        "weight_decay=0",
        "eval_steps=1",
        "verify_outputs=false",
    ]
    again = run.train(run.load(config, [*overrides, f"output_dir={out.parent / 'again'}"]), notice=lambda line: None)
    assert again.evaluations[-1][1] == pytest.approx(loss, rel=1e-6)
