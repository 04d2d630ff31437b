"""A check at the end of a run: each output is loaded once, by the library that its users will load it with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Self

from surogate_core.errors import ConfigError, RunStopped

from ..checkpoints.adapter import ADAPTER_FOLDER, MERGED_FOLDER
from ..hub.files import WEIGHT_FILES
from ..machine.system import available_memory_bytes
from ..runs.chosen_format import FILES
from ..runs.run import Run

MEMORY_SHARE = 4
"""A model is loaded with its data if that takes less than 1 / MEMORY_SHARE of the free memory, else without."""

LAST_BYTES = 4096
LONGEST_LINE = 600
"""Characters of the last line of the process's stderr that a message has."""


class OutputCheck:
    """Loads the outputs of a run in another process, where importing transformers for seconds delays nothing.

    For a short run, call `begin` at its start and `prepare` once it is planned. For any run, call `load` when the
    outputs are written, and `finish` later. The process sees no GPU and ends with the context.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._prepared: Run | None = None
        self._said: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def begin(self) -> None:
        """Start the process, unless it runs already. It imports transformers and waits."""
        if self._process is None:
            self._said = TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by `end`)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "surogate.outputs.check_process"],  # nothing of the working folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # Ctrl-C reaches the run only, which ends this process
                text=True,
            )

    def prepare(self, run: Run, *, base: bool = False) -> None:
        """Have the process import the modules that load this run's outputs.

        base: let it also look whether the run's base is complete, which `refuse_incomplete_base` waits for.
        """
        self.begin()
        assert self._process is not None and self._process.stdin is not None
        if self._prepared is None:
            library = [run.adapter[0].library] if run.adapter else []
            line = json.dumps([run.model.loaded_by, str(run.model_dir), _kept(run), base, *library])
            with suppress(BrokenPipeError):  # reported by `finish`
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            self._prepared = run

    def refuse_incomplete_base(self, run: Run) -> None:
        """Raise ConfigError if transformers finds that tensors of the base are missing, of which outputs have those
        that are not trained: a run would train for hours and write what does not load."""
        assert self._process is not None and self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise self._ended(f"{run.model_dir}: the process that checks whether it is complete")
        if problem := json.loads(answer):
            raise ConfigError(problem)

    def load(self, run: Run) -> None:
        """Have the process load the model in `output_dir`, or the adapter and the merged model."""
        self.prepare(run)
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(_requests(run)))
            self._process.stdin.close()

    def finish(self, run: Run) -> None:
        """Wait until the outputs are loaded.

        Raises RunStopped naming the folder and the error if one does not load. Deletes nothing.
        """
        process = self._process
        assert process is not None and process.stdout is not None
        answer = process.stdout.read()
        if process.wait() or not answer:
            raise self._ended(f"{run.config.output_dir} is written, but the process that checks whether it loads")
        if problem := json.loads(answer):
            raise RunStopped(problem)

    def _ended(self, what: str) -> RunStopped:
        assert self._process is not None
        code = self._process.wait()
        return RunStopped(
            f"{what} ended with exit code {code}{' (probably out of memory)' if code == -signal.SIGKILL else ''}"
            f"{self._last_words()}. Nothing was deleted. verify_outputs: false skips this check."
        )

    def _last_words(self) -> str:
        """Return the last line that the process has written on stderr, as it follows its exit code."""
        assert self._said is not None
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return f": {lines[-1][:LONGEST_LINE]}" if lines else ""

    def end(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        if self._said is not None:
            self._said.close()
        self._process = self._prepared = self._said = None


def _kept(run: Run) -> Sequence[str]:
    """Return the patterns of tensors that the run's outputs have of its base as they are."""
    return list(run.model.kept_tensors(run.dims))


def _requests(run: Run) -> list[tuple[str, str | None, str, str, str | None, Sequence[str], Sequence[str]]]:
    """Return for each folder to load: its path; the name of its adapter's plugin, maybe one in a file of the last, None
    for a model; the class that loads a model; the folder of the base model; `device_for`; `_kept`; the files of
    plugins."""
    output = Path(run.config.output_dir)
    folders: dict[Path, str | None] = {output: None}
    if run.adapter is not None:
        folders = {output / ADAPTER_FOLDER: run.adapter[0].name}
        if run.config.merge_adapter and run.config.merge_format == FILES:  # others are for other programs
            folders[output / MERGED_FOLDER] = None
    loaded_by, base, kept, plugins = run.model.loaded_by, str(run.model_dir), _kept(run), run.config.plugins
    return [(str(folder), name, loaded_by, base, device_for(folder), kept, plugins) for folder, name in folders.items()]


def device_for(folder: Path) -> str | None:
    """Return torch's meta device, where no data is read, for a model that is large for the free memory, else None."""
    size = sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    return None if size * MEMORY_SHARE < available_memory_bytes() else "meta"
