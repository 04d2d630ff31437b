"""The resolved config, the generated reference page, and what importing the configuration costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from config.harness import FakeRegistry, load

from surogate.config.load import load_config, resolved
from surogate.config.yaml import dump_yaml, read_yaml


def test_a_resolved_config_loads_as_an_equal_config(tmp_path: Path) -> None:
    loaded = load(
        run_name="1e5",
        output_dir="out$$dir",
        log_file="no",
        torch_dtype="bf16",
        optimizer="sgd",
        sgd_momentum=0.25,
        learning_rate=1e-5,
        report_to="my-board",
        datasets=[{"path": "a", "type": "text", "sample_by": "line", "samples": 3}, {"path": "b", "subset": "0123"}],
        validation_datasets=[{"path": "v"}],
    )
    values = resolved(loaded)
    (tmp_path / "run.yaml").write_text(dump_yaml(values), encoding="utf-8")
    assert json.loads(json.dumps(values)) == values == read_yaml(tmp_path / "run.yaml")
    assert load_config(values, registry=FakeRegistry(), mode="sft", source="run.yaml").config == loaded.config
    again = load_config(values, registry=FakeRegistry(), mode="train", source="run.yaml")
    assert again == loaded and resolved(again) == values and again.notices == ()


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, surogate.config.load; print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
