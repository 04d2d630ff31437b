from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surogate.hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir
from surogate_core.errors import ConfigError

huggingface_hub = pytest.importorskip("huggingface_hub")


def test_local_directory_is_used_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_dir("owner/name", CONFIG_FILES) == Path("owner/name")


def test_hub_download_asks_for_the_patterns_and_never_for_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **keys: Any) -> str:
        asked.update(keys, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_dir("Qwen/Qwen3-0.6B", [*TOKENIZER_FILES, *WEIGHT_FILES]) == tmp_path
    assert asked["repo"] == "Qwen/Qwen3-0.6B" and "*.safetensors" in asked["allow_patterns"]
    assert "*.bin" in asked["ignore_patterns"] and "*.pt" in asked["ignore_patterns"]


@pytest.mark.parametrize(
    "model", ["missing", "", "a/b/c", "/no/such", "~no_such_user/x", pytest.param("x" * 5000, id="long"), "a\0b/c"]
)
def test_a_name_that_is_neither_directory_nor_repository_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"model: .* is neither a directory"):
        resolve_model_dir(model, CONFIG_FILES)


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a file\. Name the directory"):
        resolve_model_dir(str(tmp_path / "config.json"), CONFIG_FILES)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("OfflineModeIsEnabled", "unset HF_HUB_OFFLINE"),
        ("RepositoryNotFoundError", "check the name, or set HF_TOKEN"),
        ("GatedRepoError", "accept its terms"),
        ("TimeoutError", "TimeoutError: slow"),
    ],
)
def test_failed_download_names_the_remedy(kind: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = type(kind, (OSError,), {})("slow\nmore")

    def snapshot_download(*arguments: Any, **keys: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=remedy):
        resolve_model_dir("owner/name", CONFIG_FILES)
