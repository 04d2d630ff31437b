"""The program on mutated configs: exit code 0 or 2, no traceback, no hang.

The mutations are those of `test_configs.py`, passed through a file, the command line and a process.
SUROGATE_FUZZ_SEED=<seed> repeats a run, SUROGATE_FUZZ_PROCESSES=<n> sets the number of processes.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end.product import COMMAND, environment, write_model
from fuzzing.config_mutations import GOOD, mutated

PROCESSES = int(os.environ.get("SUROGATE_FUZZ_PROCESSES", "40"))
AT_ONCE = 2
TIMEOUT_SECONDS = 60.0
LONGEST_OUTPUT = 100_000
DEEPEST = 40


def writable(value: Any, depth: int = 0) -> Any:
    """Return `value` as plain YAML; what YAML cannot express becomes text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**1000 else "1" + "0" * 5000
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping) and depth < DEEPEST:
        keys = (
            (key if key is None or isinstance(key, int | float) else str(key), inner) for key, inner in value.items()
        )
        return {writable(key): writable(inner, depth + 1) for key, inner in keys}
    if isinstance(value, list | tuple) and depth < DEEPEST:
        return [writable(inner, depth + 1) for inner in value]
    return type(value).__name__


def without_data(config: dict[Any, Any]) -> dict[Any, Any]:
    """Point the path of every dataset at a file that does not exist, so that no training starts."""
    for key in ("datasets", "validation_datasets"):
        entries = config.get(key)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                entry["path"] = "absent/nothing.txt"
    return config


def outcome(seed: int, root: Path, verb: str) -> tuple[int, str | None]:
    """Return (exit code, a description of what went wrong or None)."""
    config = writable(mutated(seed))
    if config.get("model") == GOOD["model"]:
        config["model"] = str(root / "model")
    path = root / f"{seed}.yaml"
    path.write_text(yaml.safe_dump(without_data(config), allow_unicode=bool(seed % 2)), encoding="utf-8")
    mode = random.Random(seed).choice(("train", "pt", "sft")) if verb == "train" else verb
    try:
        done = subprocess.run(
            [*COMMAND, mode, str(path)],
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            cwd=root,
            env=environment(root),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"seed {seed}: {mode} took more than {TIMEOUT_SECONDS} s"
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    printed = f"seed {seed}: {mode} {path.read_text(encoding='utf-8')[:2000]}\nexit {done.returncode}: {said[-2000:]}"
    wrong = (
        done.returncode not in (0, 2)
        or (done.returncode == 0 and verb == "train")
        or (done.returncode == 2 and b"error: " not in done.stderr)
        or "Traceback" in said
        or len(said) > LONGEST_OUTPUT
    )
    return done.returncode, printed if wrong else None


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "share"), [("plan", 0.7), ("train", 0.3)])
def test_the_program_plans_or_refuses_any_config(verb: str, share: float, tmp_path: Path) -> None:
    first = int(os.environ.get("SUROGATE_FUZZ_SEED", 1))
    count = max(1, round(PROCESSES * share))
    print(f"seeds {first} to {first + count - 1}")
    write_model(tmp_path / "model", max_position_embeddings=4096)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda seed: outcome(seed, tmp_path, verb), range(first, first + count)))
    failures = [printed for _, printed in results if printed]
    assert not failures, "\n\n".join(failures[:5])
    assert not (tmp_path / "out").exists()
    if verb == "plan" and count >= 25:
        assert {0, 2} <= {code for code, _ in results}, "the mutations must reach both outcomes"
