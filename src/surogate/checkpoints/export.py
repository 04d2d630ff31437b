"""`surogate export` and `surogate quantize`: a model in the files of an export format."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from surogate_core.api import ExportContext, LinearModules, Rewritten
from surogate_core.errors import PluginError
from surogate_core.plugins.registry import Registry

from ..hub.config_json import QUANTIZATION, read_config, read_json
from ..machine.progress import Progress
from ..runs.chosen_format import Chosen
from .export_source import CONFIG, Source, copy_beside, stops_of
from .folders import SAVING, refused_by_disk
from .hf import save_files, write_json
from .linear_modules import linear_modules, refuse_other_shapes
from .model_tensors import ModelTensor, finite
from .rewriting import write_weights
from .weights_file import AGAIN

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Export:
    """A model that is written in a format.

    named        what the user called it
    linear       (tensors of the files) -> its linear modules; None: those that a plugin finds
    adapter      the folder of an adapter that is written by itself; the source is its base
    model_dtype  see `ExportContext`
    """

    named: Path
    source: Source
    chosen: Chosen
    registry: Registry
    notice: Notice
    linear: Callable[[Mapping[str, ModelTensor]], LinearModules] | None = None
    model_dtype: Any = "bf16"
    options: Any = None
    adapter: Path | None = None

    def write(self, output: Path, make_room: Callable[[Sequence[str]], object]) -> None:
        """Write the files into a folder. Nothing of them is there before all are complete.

        make_room: called with the names of the files before they are moved. Raises ConfigError for what the format
        cannot hold, before anything is written.
        """
        format, names = self.chosen.format, list[str]()
        with self.context(output) as context:
            format.check(context)

            def write(fresh: Path) -> None:
                try:
                    format.write(context, fresh)
                except PluginError as error:
                    if error.__cause__ is not None and refused_by_disk(error.__cause__):  # no fault of the package
                        raise error.__cause__ from None
                    raise
                names[:] = sorted(path.name for path in fresh.iterdir())
                if not any(fresh.glob(format.identified_by)):
                    wrote = ", ".join(names) or "nothing"
                    raise format.failed("write", f"wrote {wrote}, expected {format.identified_by} among the files")

            save_files(output, write, format.identified_by, make_room=lambda: make_room(names))

    @contextmanager
    def context(self, output: Path) -> Iterator[ExportContext]:
        """Open the model for the format. The folder `output` must exist: a hidden one in it has files of the model."""
        prefix = f"{SAVING}beside-"  # the next command clears such a folder of one that was killed
        with self.source.tensors() as opened, tempfile.TemporaryDirectory(dir=output, prefix=prefix) as name:
            beside, tensors = Path(name), {name: finite(tensor) for name, tensor in opened.items()}
            self.source.write_beside(beside)
            stops, ends = stops_of(beside)
            threads = len(os.sched_getaffinity(0))
            with _Shown(f"{self.named}: exporting") as progress:

                def write_model(folder: Path, rewritten: Sequence[Rewritten], quantization: Mapping[str, Any]) -> None:
                    count = len(tensors)
                    write_weights(folder, tensors, rewritten, threads, lambda done: progress(done, count))
                    copy_beside(beside, folder)
                    if quantization:
                        config = read_json(folder / CONFIG, AGAIN)
                        write_json(folder / CONFIG, {**config, QUANTIZATION: {**quantization}})

                yield ExportContext(
                    source=self.named,
                    name="-".join(output.resolve().name.split()) or "model",
                    type=self.chosen.type,
                    config=read_config(beside),
                    folder=beside,
                    tensors=tensors,
                    linear=cache(lambda: self._linear(tensors)),
                    stops=stops,
                    turn_ends=ends,
                    threads=threads,
                    model_dtype=self.model_dtype,
                    options=self.options,
                    progress=progress,
                    notice=self.notice,
                    write_model=write_model,
                    adapter=self.adapter,
                )

    def _linear(self, tensors: Mapping[str, ModelTensor]) -> LinearModules:
        if self.linear is not None:
            return self.linear(tensors)
        found = linear_modules(self.source.model_dir, tensors, self.registry, self.chosen.format)
        refuse_other_shapes(self.source.model_dir, found, tensors)
        return found


@dataclass
class _Shown:
    """The progress of an export: a bar or lines, from any thread."""

    what: str
    shown: Progress | None = None
    total: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.shown is not None:
            self.shown.__exit__(*raised)

    def __call__(self, done: int, total: int) -> None:
        with self.lock:
            if self.shown is None or total != self.total:
                self.__exit__(None, None, None)
                self.shown, self.total = Progress(self.what, "tensors", total), total
            self.shown(done)
