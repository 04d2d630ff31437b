"""A run in a checkpoint: a model or adapter that other programs load, and the state that a bit-exact resume needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from surogate_core.api.destination import MANIFEST
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_core.program.value import Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.pieces import Pieces

from ..config.errors import keys_of
from ..config.load import published
from ..config.schema import DTYPE_KEYS
from ..data.cache import TokenDataset
from ..data.loader import Loader
from ..data.row_hashes import content_hash
from ..hub.config_json import QUANTIZATION
from ..runs.run import Run
from ..runs.saved_values import further_values, output_params
from ..runs.versions import neutral_distributions
from . import hf
from .adapter import write_adapter
from .base import base_facts, load_base
from .base_files import kept_tensors, stored_names
from .facts import DATA, DATASETS, MODEL_CONFIG, ROWS, TOTAL_STEPS
from .folders import sync
from .manifest import Manifest, list_files, write_manifest
from .model_ranges import load_model, write_ranges
from .other_tokens import other_tokens
from .progress import Progress
from .reference_model import reference_identity
from .resume import Resumed, another_form, differences, refuse_another_run, saved_settings
from .states import check_state, load_state, write_state
from .tensor_file import Stored

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker

View = Callable[[Value], Pieces]
"""value -> what a process has of it."""

_NEUTRAL_KINDS = ("logger", "offload", "launcher")
"""Kinds of plugins that change no bit of a run."""

_POSITION = ("tokens", "seconds", "nonfinite", "loss", "lr", "evaluations", "best", "sampled")
_NEWER = {"lr", "best", "sampled"}
"""Those that older checkpoints do not have."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """Writes and restores the checkpoints of one run.

    extends   number of steps that a saved run had in all -> whether this run is that one with more steps
    facts     what a resumed run must have in common with the saved one; see `facts`
    versions  of the packages that the run uses, and the device
    metrics   the run's metrics file
    before    () -> the hashes of the caches of its data that checkpoints of 0.1.0 may have
    turn_ends tokens that end trained turns, of which the outputs tell those who generate
    """

    run: Run
    plan: Plan
    facts: Mapping[str, Any]
    extends: Callable[[int], bool]
    versions: Mapping[str, str]
    metrics: Path
    before: Callable[[], Collection[str]] = frozenset
    turn_ends: Sequence[int] = ()

    @cached_property
    def weights(self) -> list[Value]:
        """The params that are saved as the model or the adapter."""
        return output_params(self.plan.assembly, adapter=self.run.adapter is not None)

    @cached_property
    def values(self) -> list[Value]:
        """All saved values, each once."""
        return list(dict.fromkeys([*self.weights, *self._kept_values]))

    @cached_property
    def divided(self) -> bool:
        """Whether ranks have parts of saved values, so that every process writes its own."""
        return any(v.shard for v in self.values)

    def in_ranges(self, processes: int) -> bool:
        """Whether each of several processes has only ranges of the model."""
        return processes > 1 and any(v.shard for v in self.weights)

    def refuse_ranges(self, processes: int) -> None:
        """Raise ConfigError if a process would have ranges of a weight that the files have in another order, of which
        no part can be moved alone."""
        divided = {v.name for v in self.weights if v.shard} if self.in_ranges(processes) else ()
        for tensor in (t for m in self.plan.assembly.weights if m.param in divided for t in m.tensors if t.layout):
            if not tensor.leading:
                raise ConfigError(
                    f"{tensor.name} is {tensor.layout} in checkpoints, a layout without `leading`, so that several "
                    "processes cannot write their parts of it. Use one process, or shard_weights: false."
                )

    def write(self, directory: Path, pieces: View, process: int, processes: int) -> dict[str, str]:
        """Write what a process has of `values` into a directory of all processes. Return {file: hash}.

        Process 0 also writes what all have, and the other files of the model or adapter. `complete` follows.
        """
        own = {v: pieces(v) for v in self.values if v.shard or process == 0}
        params = {v.name: own[v] for v in self.weights if v in own}
        hashes = {} if self.run.adapter else self.write_model(directory, params, process, processes)
        if self.run.adapter and process == 0:
            tensors = {name: p.tensor() for name, p in params.items()}
            write_adapter(directory, self.run, self.plan.assembly, tensors, self.facts, self.turn_ends)
        kept = [Stored(v.name, own[v], TORCH_DTYPES[v.dtype]) for v in self._kept_values if v in own]
        return hashes | write_state(directory, kept, process)

    def write_model(
        self, directory: Path, params: Mapping[str, Pieces], process: int, processes: int
    ) -> dict[str, str]:
        """Write the model as Hugging Face has it, or `in_ranges`."""
        export = model_export(self.run, self.plan, params, self.turn_ends)
        if self.in_ranges(processes):
            return write_ranges(directory, export, process)
        return hf.write_model(directory, export) if process == 0 else {}

    def complete(
        self, directory: Path, step: int, progress: Progress, hashes: Mapping[str, str], others: Mapping[str, Any]
    ) -> None:
        """Write the manifest of what `write` has written after `step`: here, with `hashes`, and by other processes.

        The metrics file is synced before it: where a checkpoint survives, so do the metrics of its steps.
        """
        run = self.run
        if self.metrics.is_file():
            for path in (self.metrics, self.metrics.parent):  # the folder holds the name of a new file
                sync(path)
        write_manifest(
            directory,
            Manifest(
                step=step,
                position={name: getattr(progress, name) for name in _POSITION},
                facts=self.facts,
                config=published(run.loaded),
                versions=self.versions,
                files=list_files(directory, hashes, others),
            ),
        )

    def check(self, resumed: Resumed) -> list[str]:
        """Raise ConfigError unless the checkpoint is of this run. Return lines for the user about other differences."""
        saved = resumed.manifest.facts
        saved_total, common = saved.get(TOTAL_STEPS), dict(self.facts)
        if common[TOTAL_STEPS] != saved_total and isinstance(saved_total, int) and self.extends(saved_total):
            common[TOTAL_STEPS] = saved_total
        if self._trains(saved.get(DATA, {})):
            common[DATA] = saved[DATA]
        inputs, defaults = self.plan.inputs, option_defaults(self.run, self.plan)
        asked, formats = self.run.config.resume_with_saved_tokens, self.run.registry.dataset_formats()
        why, source = other_tokens(saved, common, formats, asked), self.run.loaded.source
        refuse_another_run(resumed, common, defaults, source, inputs.world_size, inputs.batch_size, why)
        config = published(self.run.loaded)
        check_state(resumed.directory, self._kept_values, saved_settings(resumed, config))
        models = self.run.registry.options_models()
        neutral = {key for (kind, _), model in models.items() if kind in _NEUTRAL_KINDS for key in keys_of(model)}
        neutral |= neutral_distributions(self.run, self.plan) | self.run.loaded.idle | self.facts.keys()
        if self.plan.target.device.sm is None or self.run.config.deterministic == "true":
            neutral.add("attn_bwd_chunks")  # the same bits where gradients are deterministic without it
        lines = differences(resumed, config, self.versions, without_effect=neutral)
        return [*another_form(resumed, self.facts), *lines]

    def _trains(self, data: Mapping[str, Any]) -> bool:
        """Return whether the tokens, labels and rows are those of the fact DATA of a checkpoint.

        Before 0.2.0 there is no hash of them, but the hash of their caches by the names of that time.
        """
        if "content" in data:
            return bool(data["content"] == self.facts[DATA]["content"])
        return data.get("identity") in self.before()

    def restore(self, resumed: Resumed, worker: AnyWorker) -> Progress:
        """Fill the worker's params and states and return the saved progress. Call it before `worker.start()`."""
        progress = self.progress(resumed)
        if self.run.adapter:  # a checkpoint does not hold the base
            load_base(self.run, self.plan.assembly, worker)
        self._load(resumed.directory, worker.pieces, {*self.values})
        worker.restored(lr=progress.lr, step=progress.step, skipped=progress.nonfinite)
        return progress

    def progress(self, resumed: Resumed) -> Progress:
        """Return the saved progress, of a run that saves into its own folder from now on."""
        progress = _progress(resumed)
        if not resumed.is_in(Path(self.run.config.resolved_checkpoint_dir)):
            progress.saved = 0  # not there
            if progress.best and not progress.best.folder:
                progress.best = replace(progress.best, folder=str(resumed.directory.resolve().parent))
        return progress

    def restore_parts(self, directory: Path, worker: AnyWorker) -> None:
        """Fill the parts of the ranks of a process that is not the writer, which has restored from `directory`."""
        parts = {v for v in self.values if v.shard}
        if parts and not (directory / MANIFEST).is_file():
            raise ConfigError(
                f"resume_from_checkpoint: {directory} is not there. Every process reads its part of the checkpoint: "
                "name one on a file system that all machines of the run share."
            )
        self._load(directory, worker.pieces, parts)

    def _load(self, directory: Path, pieces: View, values: Collection[Value]) -> None:
        params = {v.name: pieces(v) for v in self.weights if v in values}
        if params and not self.run.adapter:
            names = stored_names(self.run, self.plan.assembly.weights)
            kept = [names.of(pattern) for pattern in self.run.model.kept_tensors(self.run.dims)]
            load_model(directory, names.maps(self.plan.assembly.weights), params, kept)
        if values:
            load_state(directory, self._kept_values, lambda v: pieces(v) if v in values else None)

    @cached_property
    def _kept_values(self) -> list[Value]:
        """The values that a checkpoint holds besides the model's files. With an adapter, those hold no param that is
        trained."""
        dtype = self.plan.inputs.precision.model
        return further_values(self.plan.assembly, dtype, adapter=self.run.adapter is not None)


def _progress(resumed: Resumed) -> Progress:
    steps = dict.fromkeys(("step", "launched", "saved"), resumed.step)
    if lacking := sorted({*_POSITION} - _NEWER - resumed.manifest.position.keys()):
        raise ConfigError(
            f"{resumed.directory / MANIFEST}: position lacks {', '.join(lacking)}. The checkpoint is damaged: resume "
            "from another one."
        )
    try:
        return TypeAdapter(Progress).validate_python({**resumed.manifest.position, **steps})
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigError(
            f"{resumed.directory / MANIFEST}: {'' if where in steps else 'position.'}{where}: {wrong['msg']}. The "
            "checkpoint is damaged: resume from another one."
        ) from None


def model_export(run: Run, plan: Plan, params: Mapping[str, Pieces], turn_ends: Sequence[int] = ()) -> hf.ModelExport:
    """Return the model of a run, of whose weights a process has `params`, ready to be written."""
    dtype, names = plan.inputs.precision.model, stored_names(run, plan.assembly.weights)
    return hf.ModelExport(
        weights=names.maps(plan.assembly.weights),
        params=params,
        config=run.model.saved(run.model_config),
        source_dir=run.model_dir,
        dtype=dtype,
        other_dtypes={name: param.dtype for name, param in plan.assembly.params.items() if param.dtype != dtype},
        kept=kept_tensors(run, names),
        turn_ends=turn_ends,
    )


def facts(run: Run, plan: Plan, loader: Loader, total_steps: int) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the saved one, by id (`facts`) or by their config key.

    They determine samples, schedule and buffers. The keys are part of the checkpoint's format.
    """
    config, adapter, loss = run.config, run.adapter, plan.inputs.loss
    ignored = {QUANTIZATION, "dtype", "torch_dtype", "_name_or_path", "transformers_version", "auto_map"}
    return {
        "model": run.model.name,
        **{f"{MODEL_CONFIG}{key}": value for key, value in run.model_config.items() if key not in ignored},
        **run.model_options.model_dump(mode="json"),
        "recipe": config.recipe,
        "optimizer": config.optimizer,
        # not of a loss of core, which older checkpoints do not name
        **({"loss": loss.name, **plan.inputs.loss_options.model_dump(mode="json")} if loss.origin else {}),
        **({"reference": config.reference} if loss.cached_reference else {}),
        **({"reference_model": reference_identity(run)} if config.reference_model else {}),
        **{key: fact for dataset in loader.rows.corpus.datasets for key, fact in dataset.facts.items()},
        **({"adapter": adapter[0].name, **adapter[1].model_dump(mode="json")} if adapter else {}),
        **base_facts(run, plan),
        **{DTYPE_KEYS[name]: dtype for name, dtype in asdict(plan.inputs.precision).items()},
        ROWS: loader.batch_size * loader.micro_batches,
        "sequence_len": config.sequence_len,
        "train_seed": config.train_seed,
        TOTAL_STEPS: total_steps,
        DATA: {"rows": loader.rows.n_rows, "tokens": loader.rows.n_tokens, "content": content_hash(loader.rows)},
        DATASETS: [_cache_facts(dataset) for dataset in loader.rows.corpus.datasets],
    }


def _cache_facts(dataset: TokenDataset) -> dict[str, Any]:
    """Return which cache a dataset is in, and the versions of what made its tokens."""
    made_by = {key: dataset.settings[key] for key in ("type", "version", "conversation") if key in dataset.settings}
    return {"cache": dataset.path.name if dataset.path else "", "version": 1, **made_by}


def option_defaults(run: Run, plan: Plan) -> dict[str, Any]:
    """Return the options of the model, the adapter and the loss that have their defaults."""
    defaults: dict[str, Any] = {}
    for options in (run.model_options, plan.inputs.loss_options, *([run.adapter[1]] if run.adapter else [])):
        changed = options.model_dump(exclude_defaults=True).keys()
        defaults |= options.model_dump(mode="json", exclude=set(changed))
    return defaults
