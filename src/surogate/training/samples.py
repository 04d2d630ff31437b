"""Samples of a run: its prompts, answered by its own weights between steps, in another process.

The process reads the weights from files, which are removed again, and computes on its own copy of the model, whose
bytes are planned. A step before and after has the bits that it has without samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from surogate_core.api import SampleReport
from surogate_core.dtypes import DTYPES
from surogate_core.errors import ConfigError, RunStopped

from ..checkpoints import folders as checkpoint
from ..checkpoints import hf
from ..checkpoints.adapter import write_adapter
from ..checkpoints.saved_run import model_export
from ..generation.answers import Sampling, checked
from ..generation.model_files import ModelFiles
from ..generation.prompts import Prompt, prompt_ids, read_prompts
from ..generation.sample_process import SampleTask
from ..generation.sampler import Sampler
from ..runs.run import Run
from ..runs.samples import why_unwritten
from ..runs.saved_values import adapter_params

if TYPE_CHECKING:
    from surogate_core.runtime.pieces import Pieces

    from ..checkpoints.saved_run import SavedRun
    from ..config.schema import TrainConfig
    from .steps import Steps


KEY, GENERATE = "sample_prompts", "generate"
"""The names in messages: the key of a run's samples, and the function of a callback."""


@dataclass(frozen=True)
class Samples:
    """The samples of a run, in the process that writes its outputs.

    prompts  as reports show them
    write    (empty folder) -> writes the weights as they are, as a model or an adapter
    ids      the tokens of other prompts
    """

    prompts: Sequence[Prompt]
    sampler: Sampler
    write: Callable[[Path], object]
    ids: Callable[[Sequence[Prompt]], Sequence[Sequence[int]]]
    output: Path
    safe_in: Path

    def take(self, step: int, others: Sequence[Prompt] | None = None) -> list[SampleReport] | None:
        """Return the samples after a step; None if the run is to end before they are there. Raises RunStopped.

        others: prompts in place of those of the run. Raises ConfigError for one that is too long for a row.
        """
        ids = None if others is None else self.ids(others)
        with (
            checkpoint.stopping_when_disk_refuses(self.output, safe_in=self.safe_in),
            TemporaryDirectory(dir=self.output, prefix=checkpoint.SAVING) as name,
        ):
            self.write(Path(name))
            found = self.sampler.sample(Path(name), ids)
        if found is None:
            return None
        return [
            SampleReport(
                step=step,
                index=index,
                prompt=prompt.shown,
                text=sampled.text,
                tokens=sampled.tokens,
                finish=sampled.finish,
                duration_ms=sampled.seconds * 1000,
                time=time.time(),
            )
            for index, (prompt, sampled) in enumerate(zip(others or self.prompts, found, strict=True))
        ]


def open_samples(
    saved_run: SavedRun,
    steps: Steps,
    pieces: Callable[[], Mapping[str, Pieces]],
    gpu: str,
    processes: int,
    stack: ExitStack,
) -> Samples:
    """Start the process that writes the samples of a run, or answers a callback. `stack` ends it.

    pieces     returns the weights of the run as they are
    gpu        the GPU on which it computes; "": the CPU
    processes  of the run

    Raises ConfigError, before anything is trained, for prompts that cannot be answered or are too long for a row; for a
    callback, for a run that writes no text.
    """
    config = saved_run.run.config
    if not config.sample_prompts and (why := why_unwritten(saved_run.run)):
        raise ConfigError(f"{GENERATE}: {why}")
    if saved_run.in_ranges(processes):
        raise ConfigError(
            "sample_prompts: each process of this run has only a part of the weights, and samples need all of them in "
            "one. Set zero_level: 2, train in one process, or remove the key."
        )
    prompts = config_prompts(config)
    task, ids = _task(saved_run, steps, prompts, gpu)
    sampler = Sampler(task, gpu, asked_by=KEY if prompts else GENERATE)
    stack.callback(sampler.close)
    try:
        sampler.ready()
    except RunStopped as error:
        remove = f", or remove {KEY}" * bool(prompts)
        raise ConfigError(f"{str(error).rstrip('.')}. Mend that{remove}.") from None

    write = partial(write_weights, saved_run, pieces)
    return Samples(prompts, sampler, write, ids, Path(config.output_dir), Path(config.resolved_checkpoint_dir))


def write_weights(saved_run: SavedRun, pieces: Callable[[], Mapping[str, Pieces]], folder: Path) -> None:
    """Write the weights of a run as they are into an empty folder, as a model or an adapter."""
    run, held = saved_run.run, pieces()
    if run.adapter is None:
        hf.write_model(folder, model_export(run, saved_run.plan, held, saved_run.turn_ends))
    else:
        trained = {v.name: held[v.name].tensor() for v in adapter_params(saved_run.plan.assembly)}
        write_adapter(folder, run, saved_run.plan.assembly, trained, saved_run.facts, saved_run.turn_ends)


def config_prompts(config: TrainConfig) -> list[Prompt]:
    """Return the prompts of a run. Raises ConfigError for a file without any."""
    if isinstance(config.sample_prompts, str):
        try:
            return read_prompts(Path(config.sample_prompts))
        except ConfigError as error:
            raise ConfigError(f"sample_prompts: {error}") from None
    return [Prompt(text, where=f"prompt {number}") for number, text in enumerate(config.sample_prompts, 1)]


def _task(
    saved_run: SavedRun, steps: Steps, prompts: Sequence[Prompt], gpu: str
) -> tuple[SampleTask, Callable[[Sequence[Prompt]], list[list[int]]]]:
    """Return what the process is told, and what makes tokens of other prompts."""
    run, config = saved_run.run, saved_run.run.config
    chat = bool(saved_run.turn_ends) and _ends_turns(saved_run, steps)
    if config.sample_as != "auto":
        chat = config.sample_as == "chat"
    files = ModelFiles(run.model_dir, run.model.loaded_by)
    sampling = checked(
        Sampling(
            max_new_tokens=config.sample_max_new_tokens,
            temperature=config.sample_temperature,
            top_p=config.sample_top_p,
            seed=config.train_seed,
        )
    )
    stops = dict.fromkeys([*saved_run.turn_ends, *files.stops(chat=chat)])

    def ids(of: Sequence[Prompt]) -> list[list[int]]:
        return list(_ids(run, files, of, GENERATE, chat=chat))

    task = SampleTask(
        base=None if run.adapter is None else str(run.model_dir),
        loaded_by=run.model.loaded_by,
        device="cuda:0" if gpu else "cpu",
        dtype=DTYPES[saved_run.plan.inputs.precision.model].torch_name,
        prompts=list(_ids(run, files, prompts, KEY, chat=chat)),
        batch=config.sample_batch_size,
        stops=list(stops),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )
    return task, ids


def _ends_turns(saved_run: SavedRun, steps: Steps) -> bool:
    """Return whether what the run trains ends as the answers of the chat template do."""
    from ..data.turn_ends import template_ends

    ends = template_ends(steps.data.tokenizer)
    return bool(ends) and ends[-1] in saved_run.turn_ends


def _ids(run: Run, files: ModelFiles, prompts: Sequence[Prompt], asked_by: str, *, chat: bool) -> Iterator[list[int]]:
    row, most = run.config.sequence_len, run.config.sample_max_new_tokens
    for prompt in prompts:
        try:
            ids = prompt_ids(prompt, files.tokenizer, chat=chat)
        except ConfigError as error:
            raise ConfigError(f"{asked_by}: {error}") from None
        if len(ids) + most > row:
            raise ConfigError(
                f"{asked_by}: {prompt.where}: has {len(ids):,} tokens, and with sample_max_new_tokens: {most:,} is "
                f"longer than a row (sequence_len: {row:,}). Shorten it, or lower sample_max_new_tokens."
            )
        yield ids
