"""Every output of a run is loaded once by the library that others load it with, before the run says that it is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .adapted import ADAPTER_FOLDER, MERGED_FOLDER, adapter_of
from .errors import RunStopped
from .hub import WEIGHT_FILES
from .prepare import Prepared
from .system import available_memory_bytes

MEMORY_SHARE = 4
"""A model is loaded with its data if that takes less than this part of the free memory; a larger one without."""

_MOST_NAMES = 3


def check_outputs(prepared: Prepared) -> None:
    """Load what a finished run has left in `output_dir`: the model, or the adapter and the merged model.

    Raises RunStopped that names the folder and says what is wrong. Nothing is deleted.
    """
    output, chosen = Path(prepared.loaded.config.output_dir), adapter_of(prepared)
    if chosen is None:
        check_loads(output, "transformers", lambda folder: check_model(folder, prepared.model_dir))
        return
    adapter, _ = chosen
    check_loads(output / ADAPTER_FOLDER, adapter.library, lambda folder: adapter.check(folder, prepared.model_dir))
    if prepared.loaded.config.merge_adapter:
        merged = output / MERGED_FOLDER
        check_loads(merged, "transformers", lambda folder: check_model(folder, prepared.model_dir))


def check_loads(folder: Path, library: str, check: Callable[[Path], None]) -> None:
    """Run `check` on a folder, without what libraries print. Whatever it raises becomes a RunStopped."""
    try:
        with _quiet():
            check(folder)
    except Exception as error:  # a library's own, of any kind: the run's word for all of them is that it does not load
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunStopped(
            f"{folder} is written, but does not load in {library}: {reason[:600]}. Nothing was deleted: the weights "
            "are there, and the checkpoints beside them. verify_outputs: false ends a run without this check."
        ) from error


def check_model(folder: Path, base: Path | None = None) -> None:
    """Load a model with transformers: config, generation config, every weight by name and shape, tokenizer.

    Raises what transformers raises, and ValueError for weights that are missing, unexpected or of another shape, and
    for a tokenizer with more tokens than the model, unless that of `base` has as many: a run tells of that at its
    start, and the output is as good as what it was made from. A
    model that is large for this machine's memory is loaded onto torch's meta device: names, shapes and files are
    checked all the same, and no data is read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size = sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    device = None if size * MEMORY_SHARE < available_memory_bytes() else "meta"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        dtype="auto",
        device_map=device,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, with names and shapes
    )
    model, report = loaded
    refuse_incomplete(report)
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        tokens = len(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        if tokens > model.config.vocab_size and not (base and _tokens_of(base) == tokens):
            raise ValueError(f"the tokenizer has {tokens} tokens, the model {model.config.vocab_size}")


def _tokens_of(folder: Path) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def refuse_incomplete(report: Any) -> None:
    """Raise ValueError unless a loading report of transformers says that all weights came, and no others."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = sorted(map(str, report[kind]))
        if found:
            more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
            raise ValueError(f"{kind.replace('_', ' ')}: {', '.join(found[:_MOST_NAMES])}{more}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, log lines and warnings: what matters of them is raised."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
