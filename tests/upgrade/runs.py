"""Small runs that are saved by one version of Surogate and go on with later ones.

`python tests/upgrade/runs.py` saves those of the installed version in a folder of its name, half-way. Commit them with
the release of that version, never again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from surogate.checkpoints.manifest import MANIFEST, list_files, read_manifest, write_manifest

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "examples/tiny-qwen3"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
HALF, ALL = 2, 4
STEP = f"step_{HALF:08d}"

MODEL: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "dtype": "float32",
}
RUN: Mapping[str, Any] = {
    "model_dtype": "bf16",
    "sequence_len": 32,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": ALL,
    "learning_rate": 3e-3,
    "warmup_steps": 1,
    "save_steps": HALF,
    "verify_outputs": False,
}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "full": {"optimizer": "adamw", "master_dtype": "fp32", "from_scratch": True},
    "adapter": {"optimizer": "adamw_8bit", "lora": True, "lora_rank": 4},
    "fp8": {"recipe": "fp8-hybrid", "optimizer": "normuon", "from_scratch": True},
}
"""Versions have those of their time: fp8 from 0.2.0 on."""
TEXTS = [f"{a} and {b} make {a + b}, and {b} more make {a + 2 * b}." for a in range(2, 14) for b in range(3, 11)]


def write(root: Path, name: str, base: Path) -> Path:
    """Write what a run of RUNS reads below `root`, and return its config, of which `root`/out is the output.

    An adapter is of the model in `base`.
    """
    model = base if name == "adapter" else root / "model"
    if name != "adapter":
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        for file in TOKENIZER_FILES:
            shutil.copy(TOKENIZER / file, model / file)
    data = root / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = root / f"{name}.yaml"
    paths = {"model": str(model), "datasets": [{"path": str(data), "type": "text"}], "output_dir": str(root / "out")}
    config.write_text(json.dumps(paths | dict(RUN) | dict(RUNS[name])))
    return config


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["log"] == "step"]


def forget_paths(step: Path, paths: Mapping[str, str]) -> None:
    """Replace the paths of this machine in the texts of a checkpoint."""
    for name in ("adapter_config.json", MANIFEST):
        if (step / name).is_file():
            text = (step / name).read_text()
            for path, shown in paths.items():
                text = text.replace(path, shown)
            (step / name).write_text(text)
    manifest = read_manifest(step)
    names = manifest.files.keys()
    write_manifest(step, replace(manifest, files={n: f for n, f in list_files(step, {}).items() if n in names}))


def main() -> None:
    from surogate import run
    from surogate_core import __version__

    for name in RUNS:
        saved = HERE / __version__ / name
        if saved.exists():
            sys.exit(f"{saved} is there already, and what a version saved does not change")
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            run.train(run.load(write(root, name, HERE / __version__ / "full" / STEP)))
            shutil.copytree(root / "out" / STEP, saved / STEP)
            for file in TOKENIZER_FILES:
                (saved / STEP / file).unlink()
                (saved / STEP / file).symlink_to(os.path.relpath(TOKENIZER / file, saved / STEP))
            forget_paths(saved / STEP, {str(root): "/run", str(HERE / __version__): "/base"})
            (saved / "losses.json").write_text(json.dumps(losses(root / "out")) + "\n")


if __name__ == "__main__":
    main()
