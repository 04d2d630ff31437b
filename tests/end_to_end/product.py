"""Shared by the end-to-end tests: a tiny model and corpus on disk, the program as a user starts it, its records."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = [sys.executable, "-m", "surogate.cli"]
VOCAB_SIZE = 2048

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}


def write_model(directory: Path, **changes: Any) -> Path:
    """A model directory without weights: config.json and the example's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLES / "tiny-qwen3" / name, directory / name)
    (directory / "config.json").write_text(json.dumps(MODEL_CONFIG | changes))
    return directory


def documents(count: int, longest: int = 200, skip: int = 0) -> list[str]:
    """Return speeches of Shakespeare of at most `longest` characters: short documents of unequal length."""
    text = (EXAMPLES / "data/tinyshakespeare.txt").read_text(encoding="utf-8")
    return [speech for speech in text.split("\n\n") if 10 < len(speech) <= longest][skip : skip + count]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of an offline user with home directory `home`, one thread and a dumb terminal."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SUROGATE_", "HF_", "XDG_"))}
    set_ = {"XDG_CACHE_HOME": home / "cache", "HF_HOME": home / "hf", "HF_HUB_OFFLINE": 1, "OMP_NUM_THREADS": 1}
    return own | {name: str(value) for name, value in set_.items()} | {"COLUMNS": "80", "TERM": "dumb"} | more


def invoke(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program inside this process, which saves the seconds of a start. Use it with the fixture `here`.

    An exception that is an error in our code is raised.
    """
    from typer.testing import CliRunner

    from surogate.cli.app import app

    done = CliRunner().invoke(app, [*map(str, args)], prog_name="surogate")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess([*map(str, args)], done.exit_code, done.stdout, done.stderr)


@dataclass(frozen=True)
class Workplace:
    """A directory of a user. Runs read `run.yaml` in `root`."""

    root: Path
    config: Mapping[str, Any]

    @property
    def out(self) -> Path:
        return Path(self.config["output_dir"])

    def write(self, **changes: Any) -> Path:
        """Write run.yaml with `changes` and return its path. A change to None drops the key."""
        path = self.root / "run.yaml"
        merged = {key: value for key, value in (dict(self.config) | changes).items() if value is not None}
        path.write_text(yaml.safe_dump(merged))
        return path

    def surogate(self, *args: str | Path, timeout: float = 120, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the program to its end. Standard output and standard error are captured separately."""
        return subprocess.run(
            [*COMMAND, *map(str, args)],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            cwd=self.root,
            env=environment(self.root, **environ),
        )

    def start(self, *args: str | Path) -> subprocess.Popen[str]:
        """Start the program. Its output and its errors can be read line by line from `stdout`."""
        return subprocess.Popen(
            [*COMMAND, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.root,
            env=environment(self.root),
            # As in a terminal. Background processes of a shell without job control ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def make_workplace(root: Path, **changes: Any) -> Workplace:
    """Write a tiny model and 300 short documents below `root`, and return a workplace for runs of ten steps on them."""
    model = write_model(root / "model")
    data = write_jsonl(root / "documents.jsonl", documents(300))
    config: dict[str, Any] = {
        "model": str(model),
        "from_scratch": True,
        "model_dtype": "fp32",
        "output_dir": str(root / "out"),
        "datasets": [{"path": str(data), "type": "text"}],
        "validation_split_ratio": 0.1,
        "sequence_len": 64,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "verify_outputs": False,  # the check imports transformers, which takes seconds
    }
    return Workplace(root, config | changes)


def records(output: Path, log: str | None = None) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl: all, or those of one kind."""
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if log in (None, record["log"])]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in records(output, "step")]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert exit code 2 and a single line on stderr that contains all `words`, without a traceback."""
    message = done.stderr.strip()
    assert done.returncode == 2, done.stdout + done.stderr
    assert message.startswith("error: ") and "\n" not in message, message
    assert "Traceback" not in done.stdout + message
    for word in words:
        assert word in message, message
