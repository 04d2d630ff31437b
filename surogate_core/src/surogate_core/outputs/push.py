"""What a run leaves, uploaded to the Hugging Face hub: asked before the first step, done after the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..config.load import TrainConfig
from ..errors import ConfigError
from ..hub.files import TEMPLATE_DIRECTORY, TOKENIZER_FILES, WEIGHT_FILES
from .model_card import CARD

MODEL_FILES = (*TOKENIZER_FILES, *WEIGHT_FILES, "added_tokens.json", "vocab.*", "merges.txt", "tokenizer.model", CARD)
"""What of `output_dir` is uploaded: it may hold anything, and run.yaml and metrics.jsonl tell of the user's folders."""


@dataclass(frozen=True)
class Pushed:
    """What became of an upload: where it is, or what went wrong and the command that tries again."""

    url: str = ""
    error: str = ""


def hub_api() -> Any:
    """The client; it honours HF_TOKEN, HF_ENDPOINT and the login of `hf auth login`."""
    from huggingface_hub import HfApi

    return HfApi()


def reserve(config: TrainConfig, api: Any = None) -> str:
    """Before the first step: the repository, made if it is not there, that this user may write to; owner/name.

    Raises ConfigError, with what to do, when the hub cannot be reached, or does not know or not let the user.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    later = "or set push_to_hub: false and upload later with `hf upload`."
    if HF_HUB_OFFLINE:
        raise ConfigError(f"push_to_hub: HF_HUB_OFFLINE is set, and nothing can be uploaded offline. Unset it, {later}")
    api = api or hub_api()
    try:
        user = api.whoami()["name"]
    except Exception as error:  # the library's own, its HTTP client's and the system's exceptions
        raise ConfigError(
            f"push_to_hub: the hub does not know you: {_said(error)}. Log in with `hf auth login`, or set HF_TOKEN to "
            f"a token that may write, {later}"
        ) from error
    wanted = config.hub_model_id or _repo_name(config.resolved_run_name)
    repo = wanted if "/" in wanted else f"{user}/{wanted}"
    try:
        repo = api.create_repo(repo, private=config.hub_private, exist_ok=True).repo_id
        api.auth_check(repo, write=True)
    except Exception as error:
        raise ConfigError(
            f"push_to_hub: {user} cannot write to {repo}: {_said(error)}. Use a token that may write there, name "
            f"another repository with hub_model_id, {later}"
        ) from error
    return repo


def push(folder: Path, repo: str, notice: Callable[[str], None], api: Any = None) -> Pushed:
    """Upload a finished output. Never raises: a run that is done stays done, and what failed is in the result."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    names += [f"{TEMPLATE_DIRECTORY}/{path.name}" for path in sorted((folder / TEMPLATE_DIRECTORY).glob("*.jinja"))]
    whole = (folder / "config.json").is_file()  # a model; an adapter's folder holds nothing else
    files = [name for name in names if not whole or any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
    notice(f"uploading {folder} to {repo}: {len(files)} files")
    try:
        (api or hub_api()).upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Trained with Surogate",
            allow_patterns=files,
            delete_patterns=list(WEIGHT_FILES),  # shards of an earlier upload that this one does not have
        )
    except Exception as error:
        again = f"hf upload {repo} {folder} ." + (" --exclude '*/*' run.yaml metrics.jsonl" if whole else "")
        return Pushed(
            error=f"push_to_hub: uploading to {repo} failed: {_said(error)}. The run is done and {folder} is whole. "
            f"To upload it: {again}"
        )
    return Pushed(url=f"https://huggingface.co/{repo}")


def _repo_name(run_name: str) -> str:
    """A run's name as the hub takes it: letters, digits, "-", "_" and ".", at most 96."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in run_name)
    return kept.strip("-.")[:96] or "model"


def _said(error: Exception) -> str:
    """The first line of an error, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}".rstrip(".")
