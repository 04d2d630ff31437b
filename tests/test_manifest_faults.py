"""A manifest that is no manifest is a damaged checkpoint, not a traceback or a wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surogate.checkpoints.manifest import MANIFEST, DamagedCheckpoint, read_manifest


def test_a_manifest_of_100_000_brackets_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: is not a manifest"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(DamagedCheckpoint, match="it is a named pipe, not a file"):
        read_manifest(tmp_path)
