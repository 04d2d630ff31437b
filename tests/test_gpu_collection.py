"""Tests that need a GPU are collected where there is one alone. Their imports and parameters fit all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tests_for_gpus_are_collected() -> None:
    folders = sorted(str(p) for folder in ("tests", "*/tests", "plugins/*/tests") for p in ROOT.glob(f"{folder}/gpu"))
    assert len(folders) > 15
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
