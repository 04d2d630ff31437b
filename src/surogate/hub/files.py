"""Locates the files of a model: in a local directory, or in a Hugging Face repository downloaded to the Hub's cache.

`huggingface_hub` is imported on first use. It honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Only safetensors are
downloaded as weights, never pickled files, and no code of the repository runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from surogate_core.errors import ConfigError

TEMPLATE_DIRECTORY = "additional_chat_templates"
"""Folder of a model with its named chat templates, `NAME.jinja`. The default template is chat_template.jinja."""
CONFIG_FILES = ("config.json", "generation_config.json")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a processor of images, which are copied too."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    f"{TEMPLATE_DIRECTORY}/*.jinja",
    *PROCESSOR_FILES,
    *CONFIG_FILES,
)
"""Patterns of what a tokenizer and its chat templates are read from, to download from the Hub or upload to it."""
SAVED_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Files of a tokenizer that are copied next to saved weights, as far as the source has them."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_like_repo(name: str) -> bool:
    """Return whether `name` has the form `owner/name` of a Hugging Face repository."""
    return _REPO.fullmatch(name) is not None


def find_local(name: str) -> Path | None:
    """Return the existing file or directory of that name, with `~` expanded; None if there is none we can access."""
    try:
        path = Path(name).expanduser()
        return path if name.strip() and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        return None


def resolve_model_dir(model: str, patterns: Sequence[str], where: str = "model") -> Path:
    """Return the directory with the files of `model`.

    A local directory is returned unchanged. Otherwise the files of the Hub repository `owner/name` that match
    `patterns` are downloaded, unless they are in the Hub's cache. If neither exists, a ConfigError begins with `where`.
    """
    local = find_local(model)
    if local is not None and local.is_dir():
        return local
    if local is not None:
        raise ConfigError(f"{where}: {model} is a file. Name the directory that contains config.json.")
    if not looks_like_repo(model):
        raise ConfigError(
            f"{where}: {model!r} is neither a directory (searched from {Path.cwd()}) nor a Hugging Face name. "
            "Name a directory with config.json, or a repository such as Qwen/Qwen3-0.6B."
        )
    return _download(model, patterns, where)


def _download(repo: str, patterns: Sequence[str], where: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{where}: {repo!r} is not a local directory, and downloading it needs huggingface_hub: {error}. "
            "Install it (pip install huggingface_hub), or name a local directory."
        ) from error
    try:
        return Path(snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns=list(PICKLED)))
    except Exception as error:  # exceptions of the library, of its HTTP client and of the system
        raise ConfigError(
            f"{where}: {repo!r} is not a local directory and could not be downloaded from the Hugging Face Hub. "
            f"{hub_remedy(error)}"
        ) from error


def hub_remedy(error: Exception) -> str:
    """Return one or two sentences on a failed request to the Hub: the cause and the remedy."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    first_line = (str(error).strip().splitlines() or [""])[0]
    if "GatedRepoError" in kinds:
        return "Access to it is gated: accept its terms on huggingface.co and set HF_TOKEN."
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return "There is no such public repository: check the name, or set HF_TOKEN if it is private."
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"}:
        return (
            "It is not in the local cache and the Hub cannot be reached: unset HF_HUB_OFFLINE, check the network, "
            "or use a local path."
        )
    return f"{type(error).__name__}: {first_line}"
