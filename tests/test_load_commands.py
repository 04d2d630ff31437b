"""The commands that a finished run prints can be copied into a shell."""

from __future__ import annotations

import shlex

from surogate.outputs.load_commands import model_commands


def test_a_path_with_a_space_is_one_argument_of_every_command() -> None:
    lines = dict(model_commands("out/my run"))
    assert shlex.split(lines["vLLM"]) == ["vllm", "serve", "out/my run"]
    assert "pretrained=out/my run" in shlex.split(lines["lm-eval"])
