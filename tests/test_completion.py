"""The shell completes commands, also those of packages, and their options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.prefix) / "bin"

SCRIPT = """
eval "$(surogate --show-completion)"
complete -p surogate
COMP_WORDS=(surogate %s)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_surogate_completion surogate
printf '%%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="it is bash that completes")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pla", ["plan"]),
        ("plan run.yaml --fi", ["--fit"]),
        ("convert --ou", ["--output"]),
    ],
)
def test_bash_completes_commands_and_options(typed: str, completed: list[str]) -> None:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", SCRIPT % typed], env=environment, capture_output=True, text=True, check=True)
    set_up, *found = done.stdout.split("\n")[:-1]
    assert set_up.endswith("-F _surogate_completion surogate") and found == completed, done.stderr
