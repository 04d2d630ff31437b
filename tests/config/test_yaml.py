"""YAML in and out, and `--set`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate.config.yaml import apply_overrides, dump_yaml, read_yaml
from surogate_core.errors import ConfigError


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(10**18), 10**18)
            | st.floats(allow_nan=False)
            | st.text(max_size=12),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_yaml_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "value.yaml"
    path.write_bytes(dump_yaml(value).encode())
    assert read_yaml(path) == value


def test_yaml_scalars_follow_version_1_2(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "a: 2e-4\nb: no\nc: 0123\nd: 2024-01-01\ne: [1, -2, .5, ~, '']\nf: &x {p: 1}\ng: {<<: *x, q: true}\n"
    )
    assert read_yaml(path) == {
        "a": 2e-4, "b": "no", "c": "0123", "d": "2024-01-01", "e": [1, -2, 0.5, None, ""],
        "f": {"p": 1}, "g": {"p": 1, "q": True},
    }  # fmt: skip


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 8)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "is empty"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"just text", "must be a mapping"),
        (b"a: 1\nb: 2\na: 3\n", "line 3, column 1: the key a is given twice"),
        (b"1: x\n", "line 1, column 1: the key 1 is not text"),
        (b"? [a]\n: x\n", "not text"),
        (b"a: [1, 2\nb: 3\n", "line 2, column 2: not valid YAML"),
        (b"a: b: c\n", "line 1, column 5: not valid YAML"),
        (b"a: *nothing\n", "undefined alias"),
        (b"a: &a [*a]\n", "nested more than"),
        (b"[" * 5000, "nested more than"),
        (BOMB.encode(), "holds more than"),
        (b"a: !!python/object:os.system x\n", "tag"),
        (b"a: !!int x\n", "tag"),
        (b"a: " + b"9" * 5000, "too many digits"),
        (b"a: 1\n---\nb: 2\n", "another document"),
        (b"\xff\xfea\x00", "is not UTF-8"),
        (b"a: \x00\n", "not valid YAML"),
        (b"a: x" * 300_000, "is larger than"),
    ],
)
def test_an_invalid_file_is_refused_with_line_and_column(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}: ") and says in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_an_unreadable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        read_yaml(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml("a\0b")


def test_overrides_are_yaml_and_dotted_keys_reach_inside() -> None:
    raw = {"model": "m", "distributed": {"num_nodes": 1}, "datasets": [{"path": "a"}]}
    changed = apply_overrides(
        raw,
        ["learning_rate=2e-4", "distributed.num_nodes=2", "datasets.0.path=x=y", "datasets.1.path=z",
         "report_to=[a, b]", "model=", "validation_datasets.0.path=v"],
    )  # fmt: skip
    assert changed == {
        "model": None, "distributed": {"num_nodes": 2}, "datasets": [{"path": "x=y"}, {"path": "z"}],
        "learning_rate": 2e-4, "report_to": ["a", "b"], "validation_datasets": [{"path": "v"}],
    }  # fmt: skip
    assert raw == {"model": "m", "distributed": {"num_nodes": 1}, "datasets": [{"path": "a"}]}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model", "must look like key=value"),
        ("=x", "must look like key=value"),
        ("a..b=x", "must look like key=value"),
        ("model.name=x", "inside 'm'"),
        ("datasets.path=x", "index from 0 to 1"),
        ("datasets.7.path=x", "index from 0 to 1"),
        ("model=[a", "not valid YAML"),
    ],
)
def test_an_invalid_override_is_refused_by_name(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"model": "m", "datasets": [{"path": "a"}]}, [override])
    assert str(caught.value).startswith(f"--set {override}: ") and says in str(caught.value)
