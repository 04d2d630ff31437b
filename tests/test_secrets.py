"""What a user must not publish: passwords in URLs, and secrets of the environment, are in no message and no file."""

from __future__ import annotations

import pytest

from surogate.config.errors import Findings
from surogate.config.variables import expand_variables
from surogate_core.errors import ConfigError, PluginError, RunStopped


@pytest.mark.parametrize("kind", [ConfigError, PluginError, RunStopped])
@pytest.mark.parametrize("name", ["user:pass", "hf_token", "user:p%40ss:x"])
def test_no_message_has_the_password_of_a_url(kind: type[Exception], name: str) -> None:
    said = str(kind(f"datasets.0: path: s3://{name}@host/data.jsonl is a URL; a@b.c is none"))
    assert said == "datasets.0: path: s3://***@host/data.jsonl is a URL; a@b.c is none"


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "hf_token"])
def test_a_variable_with_a_secret_is_refused_by_name_and_without_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "hidden-value")
    findings = Findings()
    expand_variables("run_name", f"r-${{{name}}}", findings)
    (problem,) = findings.problems
    assert name in problem.text and "looks like a secret" in problem.text and "hidden-value" not in problem.text


@pytest.mark.parametrize("name", ["PAD_TOKEN", "TOKENIZER_DIR", "HOME", "KEY", "SECRETARY"])
def test_other_variables_are_replaced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "value")
    findings = Findings()
    assert expand_variables("run_name", f"r-${name}", findings) == "r-value" and not findings.problems
