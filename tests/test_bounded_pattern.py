"""Regular expressions of others: matched as `re` does, with a limit of time."""

from __future__ import annotations

import os
import re

import pytest

from surogate_core.api import bounded_pattern, check_pattern, match_groups, matches_whole
from surogate_core.errors import ConfigError

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head", "q_proj", "", "é漢")
PATTERNS = (
    *("q_proj", r".*\.(q_proj|v_proj)", r"model\.layers\.\d+\..*", r"(?i)MODEL.*", r"(?P<a>.*)_(?P<b>\w+)", ".*proj$"),
    *(r"^lm_head$", r"(q|v)_proj|up", r"[^.]*", r"model.layers.0.self_attn.q_proj", "", r"\w", r"(.*\.)?(q_proj)$"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_matches_as_in_re(pattern: str) -> None:
    for name in NAMES:
        assert matches_whole(pattern, name) == (re.fullmatch(pattern, name) is not None)
        found = re.match(pattern, name)
        assert match_groups(pattern, name) == (None if found is None else found.groupdict())


@pytest.mark.parametrize("pattern", ["(([a-z_.0-9])+)+Z", r"(.*\.)?((([a-z_.0-9])+)+Z)$", "(a|a)*" * 30])
def test_one_that_does_not_end_is_named_and_the_next_one_is_matched(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_pattern, "LONGEST_SECONDS", 0.5)
    name = "a" * 40 + ".self_attn.q_proj"
    with pytest.raises(ConfigError, match=r"regular expression .* does not end on .* within 0 s\. Write it without"):
        matches_whole(pattern, name)
    assert matches_whole(r".*\.q_proj", name)


@pytest.mark.parametrize("pattern", ["(", "[", "(" * 5000, "(?P<a>x)(?P<a>y)", "*"])
def test_what_is_no_expression_is_an_error_of_re(pattern: str) -> None:
    with pytest.raises(re.error):
        check_pattern(pattern)
    with pytest.raises(re.error):
        matches_whole(pattern, "x")


def test_counted_repetitions_take_no_memory_of_this_process() -> None:
    check_pattern("((a{1000}){1000}){1000}")
    assert not matches_whole("((a{1000}){1000}){1000}", "b")


def test_a_forked_process_has_a_matcher_of_its_own() -> None:
    assert matches_whole(r".*x", "ax")
    child = os.fork()
    if not child:
        os._exit(0 if matches_whole(r".*y", "ay") and not matches_whole(r".*y", "b") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert matches_whole(r".*z", "az")
