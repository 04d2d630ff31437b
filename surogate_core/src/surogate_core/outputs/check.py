"""Every output of a run is loaded once by the library that others load it with, before the run says that it is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from ..checkpoint.adapter import ADAPTER_FOLDER, MERGED_FOLDER
from ..errors import RunStopped
from ..hub.files import WEIGHT_FILES
from ..machine.system import available_memory_bytes
from ..planning.run import Run
from ..plugins.discovery import load_registry

MEMORY_SHARE = 4
"""A model is loaded with its data if that takes less than this part of the free memory; a larger one without."""

_MOST_NAMES = 3


class OutputCheck:
    """Loads the outputs of a run in a process of its own, where importing transformers delays nobody.

    Life: `begin` with the run and `prepare` when it is planned, both if it may be short; `finish` when the outputs are
    written; leave the context in any case. The process sees no GPU.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._prepared: Run | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def begin(self) -> None:
        """Start the process, which imports transformers and waits. A process that was begun stays."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "surogate_core.outputs.check"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C is for the run, which ends this
                text=True,
            )

    def prepare(self, run: Run) -> None:
        """Have the process import what loading this run's outputs takes."""
        self.begin()
        assert self._process is not None and self._process.stdin is not None
        if self._prepared is None:
            line = json.dumps([str(run.model_dir), *([run.adapter[0].library] if run.adapter else [])])
            with suppress(BrokenPipeError):  # `finish` says so
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            self._prepared = run

    def finish(self, run: Run) -> None:
        """Load what a finished run has left in `output_dir`: the model, or the adapter and the merged model.

        Raises RunStopped that names the folder and says what is wrong. Nothing is deleted.
        """
        self.prepare(run)
        process = self._process
        assert process is not None
        answer, _ = process.communicate(json.dumps(_requests(run)))
        if process.returncode or not answer:
            raise RunStopped(
                f"{run.config.output_dir} is written, but the process that loads it once ended with "
                f"exit code {process.returncode}; -9 means that memory ran out. Nothing was deleted. "
                "verify_outputs: false ends a run without this check."
            )
        if problem := json.loads(answer):
            raise RunStopped(problem)

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        self._process = self._prepared = None


class _Request(TypedDict):
    """A folder to load. adapter: the plugin's name, with the folder of its base; None for a model of transformers."""

    folder: str
    adapter: str | None
    base: str


def _requests(run: Run) -> list[_Request]:
    output, chosen, base = Path(run.config.output_dir), run.adapter, str(run.model_dir)
    if chosen is None:
        return [_Request(folder=str(output), adapter=None, base=base)]
    requests = [_Request(folder=str(output / ADAPTER_FOLDER), adapter=chosen[0].name, base=base)]
    if run.config.merge_adapter:
        requests.append(_Request(folder=str(output / MERGED_FOLDER), adapter=None, base=base))
    return requests


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
    start, and the output is as good as what it was made from. A model that is large for this machine's memory is loaded
    onto torch's meta device: names, shapes and files are checked all the same, and no data is read.
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


# ------------------------------------------------------------------------------------------------- the process's side


def _serve() -> None:
    """Import what loading takes, as far as it is known, then load what stdin names: two lines of JSON.

    Prints "" or the problem, as JSON, and nothing else.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print
    with suppress(Exception):  # if it fails, so does the check, which says so
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    with suppress(Exception):
        _import_ahead(*json.loads(sys.stdin.readline()))
    requests = sys.stdin.read()
    if not requests:  # the run ended without asking
        return
    problem = ""
    try:
        for request in json.loads(requests):
            _check(request)
    except RunStopped as error:
        problem = str(error)
    print(json.dumps(problem), file=answers, flush=True)


def _import_ahead(base: str, *libraries: str) -> None:
    """A model without data imports its own modules of transformers, which its config alone names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for library in libraries:
        import_module(library)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, local_files_only=True))


def _check(request: _Request) -> None:
    folder = Path(request["folder"])
    if request["adapter"] is None:
        check_loads(folder, "transformers", lambda path: check_model(path, Path(request["base"])))
        return
    adapter = load_registry().get("adapter", request["adapter"])
    check_loads(folder, adapter.library, lambda path: adapter.check(path, Path(request["base"])))


if __name__ == "__main__":
    _serve()
