"""Where a model's files are: a local directory as it is, or a Hugging Face repository downloaded to the hub's cache.

`huggingface_hub` is imported on first need. It honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Weights come as
safetensors only: pickled files are never asked for, and no code of the repository runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError

TEMPLATE_DIRECTORY = "additional_chat_templates"
"""Folder of a model that holds its named chat templates as `NAME.jinja`; the default one is chat_template.jinja."""
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    f"{TEMPLATE_DIRECTORY}/*.jinja",
    *CONFIG_FILES,
)
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_like_repo(name: str) -> bool:
    """Whether `name` has the form `owner/name` of a Hugging Face repository."""
    return _REPO.fullmatch(name) is not None


def find_local(name: str) -> Path | None:
    """The existing file or directory of that name, `~` expanded; None when there is none that we may look at."""
    try:
        path = Path(name).expanduser()
        return path if name.strip() and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        return None


def resolve_model_dir(model: str, patterns: Sequence[str], where: str = "model") -> Path:
    """The directory that holds `model`'s files.

    A local directory is returned as it is. Else `owner/name` is looked up on the hub and the files that match
    `patterns` are downloaded (nothing, when they are in the hub's cache). Raises ConfigError, which begins with
    `where`, when there is neither.
    """
    local = find_local(model)
    if local is not None and local.is_dir():
        return local
    if local is not None:
        raise ConfigError(f"{where}: {model} is a file. Name the directory that holds config.json.")
    if not looks_like_repo(model):
        raise ConfigError(
            f"{where}: {model!r} is no directory (looked from {Path.cwd()}) and no Hugging Face name. "
            "Give a directory with config.json, or a name such as Qwen/Qwen3-0.6B."
        )
    return _download(model, patterns, where)


def _download(repo: str, patterns: Sequence[str], where: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{where}: {repo!r} is no local directory, and fetching it needs huggingface_hub: {error}. "
            "Install it (pip install huggingface_hub) or give a local directory."
        ) from error
    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns=list(PICKLED)))
    except Exception as error:  # the library raises its own, its HTTP client's and the system's exceptions
        raise ConfigError(
            f"{where}: {repo!r} is no local directory and could not be fetched from the Hugging Face hub. "
            f"{hub_remedy(error)}"
        ) from error


def hub_remedy(error: Exception) -> str:
    """One or two sentences for a failed request to the hub: what it was and what to do."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    first_line = (str(error).strip().splitlines() or [""])[0]
    if "GatedRepoError" in kinds:
        return "Access to it is gated: accept its terms on huggingface.co and set HF_TOKEN."
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return "There is no such public repository: check the name, or set HF_TOKEN if it is private."
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"}:
        return (
            "It is not in the local cache and the hub cannot be reached: unset HF_HUB_OFFLINE, check the network, "
            "or give a local path."
        )
    return f"{type(error).__name__}: {first_line}"
