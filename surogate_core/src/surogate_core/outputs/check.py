"""A check at the end of a run: each output is loaded once, by the library that its users will load it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..api import CAUSAL_LM
from ..checkpoint.adapter import ADAPTER_FOLDER, MERGED_FOLDER
from ..errors import RunStopped
from ..hub.files import WEIGHT_FILES
from ..machine.system import available_memory_bytes
from ..planning.run import Run
from ..plugins.discovery import load_registry
from ..reporting.text import names_text

MEMORY_SHARE = 4
"""A model is loaded with its data if that takes less than 1 / MEMORY_SHARE of the free memory, else without."""


class OutputCheck:
    """Loads the outputs of a run in another process, where importing transformers for seconds delays nothing.

    For a short run, call `begin` at its start and `prepare` once it is planned. For any run, call `finish` when the
    outputs are written. The process sees no GPU and ends with the context.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._prepared: Run | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def begin(self) -> None:
        """Start the process, unless it runs already. It imports transformers and waits."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "surogate_core.outputs.check"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C reaches the run only, which ends this process
                text=True,
            )

    def prepare(self, run: Run) -> None:
        """Have the process import the modules that load this run's outputs."""
        self.begin()
        assert self._process is not None and self._process.stdin is not None
        if self._prepared is None:
            library = [run.adapter[0].library] if run.adapter else []
            line = json.dumps([run.model.loaded_by, str(run.model_dir), *library])
            with suppress(BrokenPipeError):  # reported by `finish`
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            self._prepared = run

    def finish(self, run: Run) -> None:
        """Load the model in `output_dir`, or the adapter and the merged model.

        Raises RunStopped naming the folder and the error if one does not load. Deletes nothing.
        """
        self.prepare(run)
        process = self._process
        assert process is not None
        answer, _ = process.communicate(json.dumps(_requests(run)))
        if process.returncode or not answer:
            raise RunStopped(
                f"{run.config.output_dir} is written, but the process that checks whether it loads ended with exit "
                f"code {process.returncode} (-9: probably out of memory). Nothing was deleted. verify_outputs: false "
                "skips this check."
            )
        if problem := json.loads(answer):
            raise RunStopped(problem)

    def end(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        self._process = self._prepared = None


def _requests(run: Run) -> list[tuple[str, str | None, str, str, Sequence[str]]]:
    """Return for each folder to load: its path, the name of its adapter's plugin, maybe one in a file of the last, None
    for a model; the class that loads a model; the folder of the base model; the files of plugins."""
    output = Path(run.config.output_dir)
    folders: dict[Path, str | None] = {output: None}
    if run.adapter is not None:
        folders = {output / ADAPTER_FOLDER: run.adapter[0].name}
        if run.config.merge_adapter:
            folders[output / MERGED_FOLDER] = None
    base, plugins = str(run.model_dir), run.config.plugins
    return [(str(folder), name, run.model.loaded_by, base, plugins) for folder, name in folders.items()]


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


def check_model(folder: Path, base: Path | None = None, loaded_by: str = CAUSAL_LM) -> None:
    """Load a model with a class of transformers: configs, every weight by name and shape, tokenizer.

    Raises what transformers raises, and ValueError for weights that are missing, unexpected or of another shape, and
    for a tokenizer with more tokens than the model. If the tokenizer of `base` has as many tokens, the output is as
    good as its base, and a run gives notice of it at its start. A model that is large for the free memory is loaded
    onto torch's meta device: names, shapes and files are checked, but no data is read.
    """
    import transformers

    size = sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    device = None if size * MEMORY_SHARE < available_memory_bytes() else "meta"
    loaded: Any = getattr(transformers, loaded_by).from_pretrained(
        folder,
        local_files_only=True,
        dtype="auto",
        device_map=device,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report names them
    )
    model, report = loaded
    refuse_incomplete(report)
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        tokens = _tokens_of(folder)
        if tokens > model.config.vocab_size and not (base and _tokens_of(base) == tokens):
            raise ValueError(f"the tokenizer has {tokens} tokens, the model {model.config.vocab_size}")


def _tokens_of(folder: Path) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def refuse_incomplete(report: Any) -> None:
    """Raise ValueError if transformers' loading report has missing, unexpected or mismatched weights, or errors."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = sorted(map(str, report[kind]))
        if found:
            raise ValueError(f"{kind.replace('_', ' ')}: {names_text(found)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and warnings. Errors are raised all the same."""
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


# -------------------------------------------------------------------------------------------------------- the process


def _serve() -> None:
    """Read two lines of JSON from stdin, the modules to import and the folders to load, and do so.

    Print "" or the problem as JSON, and nothing else.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    with suppress(Exception):  # if the import fails, the check fails too and reports it
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    with suppress(Exception):
        _import_ahead(*json.loads(sys.stdin.readline()))
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


def _import_ahead(loaded_by: str, base: str, *libraries: str) -> None:
    """Build a model without data, which imports the modules of transformers that its config selects."""
    import torch
    import transformers

    for library in libraries:
        import_module(library)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
        getattr(transformers, loaded_by).from_config(config)


def _check(folder: str, name: str | None, loaded_by: str, base: str, plugins: Sequence[str]) -> None:
    if name is None:
        check_loads(Path(folder), "transformers", lambda path: check_model(path, Path(base), loaded_by))
        return
    adapter = load_registry(files=plugins).adapter(name)
    check_loads(Path(folder), adapter.library, lambda path: adapter.check(path, Path(base)))


if __name__ == "__main__":
    _serve()
