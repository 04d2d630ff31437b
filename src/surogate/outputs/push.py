"""Uploads a run's output to the Hugging Face hub. Access is checked before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from surogate_core.api.destination import RUN_FILE
from surogate_core.errors import ConfigError

from ..config.schema import TrainConfig
from ..hub.files import TEMPLATE_DIRECTORY, TOKENIZER_FILES, WEIGHT_FILES
from ..reporting.metrics import METRICS_FILE
from ..runs.plan_json import PLAN_FILE
from .model_card import CARD

MODEL_FILES = (*TOKENIZER_FILES, *WEIGHT_FILES, "added_tokens.json", "vocab.*", "merges.txt", "tokenizer.model", CARD)
"""Files of `output_dir` that are uploaded. It may hold anything else; run.yaml, metrics.jsonl, plan.json hold local
paths."""


@dataclass(frozen=True)
class Pushed:
    """The result of an upload: its URL, or an error with the command that tries again."""

    url: str = ""
    error: str = ""


def hub_api() -> Any:
    """Return the hub's client. It honours HF_TOKEN, HF_ENDPOINT and the login of `hf auth login`."""
    from huggingface_hub import HfApi

    return HfApi()


def reserve(config: TrainConfig) -> str:
    """Return the name of the run's repository, owner/name. Create it if it does not exist.

    Call it before the first step. Raises ConfigError, with a remedy, if the hub cannot be reached, nobody is logged in,
    or the user may not write to the repository.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    later = "or set push_to_hub: false and upload later with `hf upload`."
    if HF_HUB_OFFLINE:
        raise ConfigError(f"push_to_hub: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, {later}")
    api = hub_api()
    try:
        user = api.whoami()["name"]
    except Exception as error:  # the library's own, its HTTP client's and the system's exceptions
        raise ConfigError(
            f"push_to_hub: cannot log in to the Hugging Face hub: {_first_line(error)}. Log in with `hf auth login`, "
            f"set HF_TOKEN to a token with write access, {later}"
        ) from error
    wanted = config.hub_model_id or _repo_name(config.resolved_run_name)
    repo = wanted if "/" in wanted else f"{user}/{wanted}"
    try:
        repo = api.create_repo(repo, private=config.hub_private, exist_ok=True).repo_id
        api.auth_check(repo, write=True)
    except Exception as error:
        raise ConfigError(
            f"push_to_hub: {user} cannot write to {repo}: {_first_line(error)}. Use a token with write access, name "
            f"another repository with hub_model_id, {later}"
        ) from error
    return repo


def push(folder: Path, repo: str, notice: Callable[[str], None]) -> Pushed:
    """Upload the output of a finished run. A failure is returned, not raised, because the run itself has succeeded."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    names += [f"{TEMPLATE_DIRECTORY}/{path.name}" for path in sorted((folder / TEMPLATE_DIRECTORY).glob("*.jinja"))]
    is_model = (folder / "config.json").is_file()  # the folder of an adapter holds nothing else
    files = [name for name in names if not is_model or any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
    notice(f"uploading {folder} to {repo}: {len(files)} files")
    try:
        hub_api().upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Trained with Surogate",
            allow_patterns=files,
            delete_patterns=list(WEIGHT_FILES),  # an earlier upload may have had more shards
        )
    except Exception as error:
        again = f"hf upload {repo} {folder} ." + (
            f" --exclude '*/*' {RUN_FILE} {METRICS_FILE} {PLAN_FILE}" if is_model else ""
        )
        return Pushed(
            error=f"push_to_hub: uploading to {repo} failed: {_first_line(error)}. The run is done and {folder} is "
            f"complete. To upload it: {again}"
        )
    return Pushed(url=f"https://huggingface.co/{repo}")


def _repo_name(run_name: str) -> str:
    """Return a run's name with the characters that the hub allows: letters, digits, "-", "_" and ".", at most 96."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in run_name)
    return kept.strip("-.")[:96] or "model"


def _first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}".rstrip(".")
