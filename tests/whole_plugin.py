"""Runs with the complete plugin of `made_up_plugins`: what it needs installed, its config, and a command's error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from made_up_plugins import REFERENCE, WHOLE, Install, installing
from safetensors.torch import save_file
from typer.testing import Result

TOKENIZER = Path(__file__).parents[1] / "examples/tiny-qwen3"

BOOM = r"KeyError: 'boom' \(.*acme_zz\.py:\d+\)"
MODEL, OPTIMIZER, RECIPE = "model acme_model of acme 0.1.0", "optimizer zz of acme 0.1.0", "recipe acme of acme 0.1.0"
ADAPTER, FORMAT, OP = "adapter acme of acme 0.1.0", "format acme of acme 0.1.0", "op acme_twice of acme 0.1.0"
KERNEL, LAUNCHER, LOGGER = "kernel acme_twice of acme 0.1.0", "launcher acme of acme 0.1.0", "logger acme of acme 0.1.0"
"""The definitions of the plugin in errors, and the error of `boom`."""


def whole_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Yield a function that installs the complete plugin, as `installing` does."""
    (tmp_path / "acme_reference.py").write_text(REFERENCE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SUROGATE_TRACEBACK", raising=False)
    yield from installing(tmp_path, monkeypatch, WHOLE)


def write_config(folder: Path, **changes: Any) -> Path:
    """Write a run.yaml that trains the model of the complete plugin with its optimizer for a step."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, model / name)
    config = {"architectures": ["AcmeForCausalLM"], "model_type": "acme", "vocab_size": 2048}
    (model / "config.json").write_text(json.dumps(config))
    if not changes.get("from_scratch", True):
        save_file({name: torch.ones(2048, 8) for name in ("embedding", "head")}, model / "model.safetensors")
    (folder / "rows.jsonl").write_text('{"acme": "to be or not to be, that is the question"}\n' * 64)
    base = {
        "model": str(model),
        "from_scratch": True,
        "model_dtype": "fp32",
        "optimizer": "zz",
        "max_steps": 1,
        "sequence_len": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "validation_split_ratio": 0,
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "acme"}],
        "output_dir": str(folder / "out"),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base | changes))
    return path


def the_error(result: Result) -> str:
    """Return the last line of a command without "error: ". There is no traceback."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("error: ") and result.output.count("error: ") == 1, result.output
    return last.removeprefix("error: ")
