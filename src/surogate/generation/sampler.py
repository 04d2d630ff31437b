"""Starts and asks the process that writes samples. Imports no torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from surogate_core.errors import RunStopped

if TYPE_CHECKING:
    from .sample_process import SampleTask

_POLL = 0.2
"""Seconds between two looks at whether the run is to end."""
_LAST_BYTES = 4096


class Sampled(NamedTuple):
    """A text that the process has written; see `Answer`."""

    text: str
    tokens: int
    finish: str
    seconds: float


class Sampler:
    """The process. It begins when this is made, and `ready` waits for it. cut: whether nobody waits any more."""

    def __init__(
        self,
        task: SampleTask,
        visible_gpu: str,
        cut: Callable[[], bool] = lambda: False,
        asked_by: str = "sample_prompts",
    ) -> None:
        """visible_gpu: the value of CUDA_VISIBLE_DEVICES; "": no GPU. asked_by: what messages name."""
        self.cut, self._asked_by = cut, asked_by
        self._count = len(task.prompts)
        self._buffer = b""
        self._said: IO[str] = TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "surogate.generation.sample_process"],  # nothing of the working folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible_gpu},
            start_new_session=True,  # Ctrl-C reaches the run only, which ends this process
        )
        self._write(asdict(task))

    def ready(self) -> None:
        """Wait until the process has loaded what does not change. Raises RunStopped if it cannot."""
        self._read()

    def sample(self, folder: Path, prompts: Sequence[Sequence[int]] | None = None) -> Sequence[Sampled] | None:
        """Return the samples of the model or adapter in a folder; None if they were cut, which ends the process.

        prompts: the tokens of each; None: those of the task. Raises RunStopped if there are none.
        """
        self._write({"folder": str(folder), "prompts": prompts})
        found: list[Sampled] = []
        for _ in range(self._count if prompts is None else len(prompts)):
            answer = self._read()
            if answer is None:
                self.close()
                return None
            found.append(Sampled(*answer))
        return found

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._said.close()

    def _write(self, value: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reported by `_read`
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> Any:
        """Return the next answer; None if it was cut."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], _POLL)[0]:
                if self.cut():
                    return None
                continue
            more = os.read(descriptor, 1 << 16)
            if not more:
                raise RunStopped(self._ended())
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise RunStopped(f"{self._asked_by}: {answer['error']}")
        return answer

    def _ended(self) -> str:
        code = self._process.wait()
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        memory = " (probably out of memory)" if code == -signal.SIGKILL else ""
        said = f": {lines[-1][:400]}" if lines else ""
        return f"{self._asked_by}: the process that writes samples ended with exit code {code}{memory}{said}."
