"""Training from a script on a GPU: to the bits of the program, and as the page for researchers shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import program_run
import pytest
import saved_batches
from page_blocks import blocks

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def test_losses_and_weights_are_those_of_a_run_of_the_program_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, weights = program_run.train(tmp_path, monkeypatch)
    found, held = saved_batches.train(tmp_path, program_run.ROW_LENGTH, program_run.LEARNING_RATE)
    assert found == losses and len(losses) == 5
    assert all(np.array_equal(held[name], weights[name]) for name in weights)


def test_the_page_for_researchers_runs(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = []
    for block in blocks(ROOT / "docs/research.md"):
        if block.todo not in ("file", "run"):
            continue
        script = tmp_path / (block.file or f"block{block.line}.py")
        script.write_text(block.text)
        if block.todo == "run":
            command = block.text.split()[1:] if block.language == "bash" else [script.name]
            done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block.text}\n{done.stderr}"
            printed.append(done.stdout)
    expected = ("step 30: loss", "sign: 7.6 to", "from there: ", "9 labels, loss")
    assert all(line in text for line, text in zip(expected, printed, strict=True))
