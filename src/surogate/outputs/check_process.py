"""The process of `OutputCheck`: loads each output once, by the library that its users will load it with.

Its imports take seconds, for which a short run waits. So it imports little of core.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib import import_module
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from surogate_core.errors import RunStopped

from ..reporting.text import names_text


def check_loads(folder: Path, library: str, check: Callable[[Path], None]) -> None:
    """Run `check` on a folder, with the output of libraries silenced. Any exception becomes a RunStopped."""
    try:
        with quiet():
            check(folder)
    except Exception as error:  # libraries raise exceptions of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunStopped(
            f"{folder} is written, but does not load in {library}: {reason[:600]}. Nothing was deleted: weights "
            "and checkpoints are still there. verify_outputs: false skips this check."
        ) from error


def check_model(
    folder: Path, loaded_by: str, base: Path | None = None, device: str | None = None, kept: Sequence[str] = ()
) -> None:
    """Load a model with a class of transformers: configs, every weight by name and shape, tokenizer.

    Raises what transformers raises, and ValueError for weights that are missing, unexpected or of another shape, and
    for a tokenizer with more tokens than the model. If the tokenizer of `base` has as many tokens, the output is as
    good as its base, and a run gives notice of it at its start. On the `device` "meta", names, shapes and files are
    checked, but no data is read. `kept`: patterns of tensors of the base that the class need not have, such as layers
    that predict further tokens.
    """
    import transformers

    loaded: Any = getattr(transformers, loaded_by).from_pretrained(
        folder,
        local_files_only=True,
        dtype="auto",
        device_map=device,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report names them
    )
    model, report = loaded
    refuse_incomplete(report, kept)
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        tokens, size = _tokens_of(folder), model.config.get_text_config().vocab_size
        if tokens > size and not (base and _tokens_of(base) == tokens):
            raise ValueError(f"the tokenizer has {tokens} tokens, the model {size}")


def _tokens_of(folder: Path) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def refuse_incomplete(report: Any, kept: Sequence[str] = ()) -> None:
    """Raise ValueError if transformers' loading report has missing, unexpected or mismatched weights, or errors.

    Those that match a pattern in `kept` are not unexpected.
    """
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = sorted(map(str, report[kind]))
        if kind == "unexpected_keys":
            found = [name for name in found if not any(fnmatchcase(name, pattern) for pattern in kept)]
        if found:
            raise ValueError(f"{kind.replace('_', ' ')}: {names_text(found)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, log lines and warnings of transformers, and log lines of bitsandbytes, which PEFT imports.

    Errors are raised all the same.
    """
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    others = getLogger("bitsandbytes")
    level_of_others = others.level
    others.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        others.setLevel(level_of_others)
        if bars:
            logging.enable_progress_bar()


def problem_of_base(folder: Path, loaded_by: str, kept: Sequence[str]) -> str:
    """Return what a base lacks or has too much, as transformers finds; "" if nothing. Reads no data."""
    try:
        with quiet():
            check_model(folder, loaded_by, base=folder, device="meta", kept=kept)
    except Exception as error:  # libraries raise exceptions of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"{folder}: does not load in transformers: {reason[:600]}. Download the checkpoint again."
    return ""


def _serve() -> None:
    """Read two lines of JSON from stdin, the modules to import and the folders to load, and do so.

    Print "" or the problem as JSON, and nothing else; before that the same of the base, if the first line asks for it.
    """
    gc.disable()  # imports make objects that stay: collections take a sixth of their time
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    with suppress(Exception):  # if the import fails, the check fails too and reports it
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    with suppress(Exception):
        loaded_by, base, kept, checks_base, *libraries = json.loads(sys.stdin.readline())
        if checks_base:
            print(json.dumps(problem_of_base(Path(base), loaded_by, kept)), file=answers, flush=True)
        _import_ahead(loaded_by, base, *libraries)
    requests = sys.stdin.read()
    if not requests:  # the run ended without asking
        return
    problem = ""
    try:
        for request in json.loads(requests):
            _check(*request)
    except RunStopped as error:
        problem = str(error)
    print(json.dumps(problem), file=answers, flush=True)
    os._exit(0)  # the run waits, and taking down the modules of transformers takes 0.7 s


def _import_ahead(loaded_by: str, base: str, *libraries: str) -> None:
    """Build a model without data, which imports the modules of transformers that its config selects."""
    import torch
    import transformers

    for library in libraries:
        import_module(library)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
        getattr(transformers, loaded_by).from_config(config)


def _check(
    folder: str,
    name: str | None,
    loaded_by: str,
    base: str,
    device: str | None,
    kept: Sequence[str],
    plugins: Sequence[str],
) -> None:
    if name is None:
        check_loads(Path(folder), "transformers", lambda path: check_model(path, loaded_by, Path(base), device, kept))
        return
    from surogate_core.plugins.discovery import load_registry

    adapter = load_registry(files=plugins).adapter(name)
    check_loads(Path(folder), adapter.library, lambda path: adapter.check(path, Path(base)))


if __name__ == "__main__":
    _serve()
