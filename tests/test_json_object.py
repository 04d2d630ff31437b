"""The one reader of JSON objects in files of others, and what is no regular file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surogate_core.api import json_object as module
from surogate_core.api import read_json_object
from surogate_core.api.json_object import DEEPEST
from surogate_core.api.regular_file import is_regular, refuse_special
from surogate_core.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not valid JSON: Expecting value"),
        (b"[1]", "must contain a JSON object, contains list"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "has the key 'c' twice in one object"),
        (b"[" * 100_000, "is not valid JSON: it nests deeper than 100 levels"),
        (b'{"a": ' * DEEPEST + b"[]" + b"}" * DEEPEST, "is not valid JSON: it nests deeper than 100 levels"),
        (b'{"a": "\xff"}', "is not valid JSON: 'utf-8' codec can't decode"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
    ],
)
def test_what_is_not_one_object_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_json_object(path, "Save it again.")
    assert str(refused.value).startswith(f"{path}: {said}") and str(refused.value).endswith(". Save it again.")


def test_a_file_of_99_levels_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": ' * (DEEPEST - 1) + b"[]" + b"}" * (DEEPEST - 1))
    assert read_json_object(tmp_path / "x.json").keys() == {"a"}


def test_the_largest_size_is_named_when_it_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_BYTES", 1 << 20)
    (tmp_path / "x.json").write_bytes(b'{"a": 1}' + b" " * (1 << 20))
    with pytest.raises(ConfigError, match="is larger than 1 MiB, the most that is read"):
        read_json_object(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_is_no_traceback(tmp_path: Path, name: str) -> None:
    assert not is_regular(tmp_path / name)
    refuse_special(tmp_path / name)
    with pytest.raises(ConfigError):
        read_json_object(tmp_path / name)


def test_a_named_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"x\.json: cannot be read: it is a named pipe, not a file"):
        read_json_object(tmp_path / "x.json")
