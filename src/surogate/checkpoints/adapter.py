"""Files of adapters: loaded into a run's params, saved, merged with their base into one model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api import AdapterDef, Merge
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

from ..config.keys import ADAPTER_FIELDS, ADAPTER_FLAG
from ..hub.config_json import QUANTIZATION, read_config, read_json, text_part
from ..hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, find_local, resolve_model_dir
from ..hub.generation_config import GENERATION_CONFIG, stop_ids
from ..runs.published_form import form_of
from ..runs.run import Run, named_model, of_weights
from ..runs.saved_values import adapter_params
from ..runs.stored_names import StoredNames
from .trained_base import check_base, is_other_base, write_base

if TYPE_CHECKING:
    from torch import Tensor

    from .formed_weights import FormedWeights

ADAPTER_FOLDER = "adapter"
MERGED_FOLDER = "merged"


def check_adapter(run: Run, notice: Callable[[str], None]) -> None:
    """Look at `adapter_path`, if the config names one, before data is read. Say so if its files name another base.

    Raises ConfigError if it is no folder of an adapter that the run's adapter reads.
    """
    path = run.config.adapter_path
    if path is None or run.adapter is None:
        return
    file = Path(path) / run.adapter[0].config_file
    if not file.is_file():
        raise ConfigError(f"adapter_path: {path}: holds no {file.name}. Name the folder that has it.")
    _refuse_other_kind(run, Path(path), run.adapter[0])
    base = read_json(file, "Save the adapter again.").get("base_model_name_or_path")
    if is_other_base(Path(path), run.model_dir):
        notice(f"adapter_path: {path} was trained on other weights than those of model: its own may not fit")
    elif isinstance(base, str) and Path(base).name != Path(run.config.model).name:
        notice(f"adapter_path: {path} was trained on {base}, and model is {run.config.model}: its weights may not fit")


def _refuse_other_kind(run: Run, folder: Path, adapter: AdapterDef) -> None:
    if (folder / adapter.config_file).is_file() and not adapter.matches(folder):
        other = kind_of_adapter(run.registry, folder)
        raise ConfigError(
            f"adapter_path: {folder} is an adapter of {other}, and this run trains {adapter.name}. "
            f"Set adapter: {other}."
        )


def load_adapter(run: Run, assembly: Assembly, params: Mapping[str, Tensor]) -> None:
    """Copy the adapter in `adapter_path`, if the config names one, into `params`.

    Raises ConfigError unless it has exactly the tensors that the run trains.
    """
    path = run.config.adapter_path
    if path is None or run.adapter is None:
        return
    adapter, options = run.adapter
    _refuse_other_kind(run, Path(path), adapter)
    trained = trained_tensors(assembly, params)
    wanted = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    tensors = adapter.load(Path(path), options)
    differing = sorted(wanted.keys() ^ tensors.keys())
    if differing:
        name = differing[0]
        raise ConfigError(
            f"adapter_path: {path} "
            + (f"lacks {name}" if name in wanted else f"holds {name}, which this run does not train")
            + f" ({len(differing)} such tensors). It must be of the same model, targets and modules."
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise ConfigError(
                f"adapter_path: {path}: {name} is {list(tensor.shape)}, expected {list(wanted[name])}. "
                "It must be of the same model, targets and modules."
            )
    for name, tensor in tensors.items():
        trained[name].copy_(tensor)


def trained_tensors(assembly: Assembly, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of `adapter_params`, named as an adapter stores them.

    Weights of the model have the names of the checkpoint's tensors, all others those of the params.
    """
    from .stored_weights import rows_of

    maps = {m.param: m for m in assembly.weights}
    tensors: dict[str, Tensor] = {}
    for value in adapter_params(assembly):
        param = params[value.name]
        if value.name in maps:
            tensors |= {t.name: param.narrow(0, row, t.rows[0]) for t, row in rows_of(maps[value.name])}
        else:
            tensors[value.name] = param
    return tensors


def write_adapter(
    folder: Path,
    run: Run,
    assembly: Assembly,
    params: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    turn_ends: Sequence[int] = (),
) -> None:
    """Write the run's adapter and tokenizer into an empty folder.

    facts: of the run, for the identity of its base, with which a merge compares the one that it finds.
    turn_ends: tokens that end trained turns. If the base's generation config does not stop at one of them, the folder
    gets one that does, which a merge reads.
    """
    from .hf import copy_tokenizer, write_stops

    assert run.adapter is not None
    adapter, options = run.adapter
    adapter.save(trained_tensors(assembly, params), folder, run.config.model, options)
    if not (folder / adapter.config_file).is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise adapter.failed("save", f"wrote {found}, expected the config_file {adapter.config_file} among the files")
    copy_tokenizer(run.model_dir, folder)
    write_base(folder, facts)
    if set(turn_ends) - {*stop_ids(run.model_dir)}:
        given, written = run.model_dir / GENERATION_CONFIG, folder / GENERATION_CONFIG
        written.write_bytes(given.read_bytes() if given.is_file() else b"{}")
        write_stops(written, turn_ends, run.model_dir)


def kind_of_adapter(registry: Registry, folder: Path) -> str:
    """Return the name of the installed adapter plugin that reads a folder, by its content.

    Raises ConfigError if there is none, or several.
    """
    adapters = {name: registry.adapter(name) for name in registry.names("adapter")}
    if not adapters:
        raise registry.missing(ADAPTER_FLAG.kind, ADAPTER_FLAG.name)
    named = {name: adapter for name, adapter in adapters.items() if (folder / adapter.config_file).is_file()}
    found = [name for name, adapter in named.items() if adapter.matches(folder)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{folder}: could be an adapter of {' or '.join(found)}. Choose one: --adapter {found[0]}.")
    if len(adapters) == 1 and not named:  # its own error says what the folder lacks
        return next(iter(adapters))
    if not named:
        readers: dict[str, list[str]] = {}
        for name, adapter in adapters.items():
            readers.setdefault(adapter.config_file, []).append(name)
        wanted = ", ".join(f"{file} ({', '.join(names)})" for file, names in readers.items())
        below = sorted(str(path.parent) for file in readers for path in folder.glob(f"*/{file}"))
        name = f"Name the folder of one{f': {below[0]}' if below else ''}."
        raise ConfigError(f"{folder}: is not a saved adapter: it holds none of {wanted}. {name}")
    path = folder / next(iter(named.values())).config_file
    content = read_json(path, "Save the adapter again.")  # its kind, and the features that are on:
    facts = {key: value for key, value in content.items() if key == "peft_type" or (key.startswith("use_") and value)}
    said = ", ".join(f"{key}: {json.dumps(value)}" for key, value in facts.items())
    package = next((ADAPTER_FIELDS[key] for key in facts if key in ADAPTER_FIELDS), None)
    raise ConfigError(
        f"{path}{f' says {said}' if said else ''}: no installed adapter reads it; {', '.join(named)} "
        f"{'does' if len(named) == 1 else 'do'} not. "
        + (f"pip install {package}" if package else "Install the package that does, or name another folder.")
    )


@dataclass(frozen=True)
class Merging:
    """A saved adapter and its base, checked to fit each other.

    names   of tensors in the files of the base
    formed  the weights of the base that its files hold in a checkpoint form. The merged model has all of them in bf16.
    """

    base_dir: Path
    merge: Merge
    names: StoredNames
    adapter_dir: Path | None = None
    formed: FormedWeights | None = None

    def write(self, output: Path, make_room: Callable[[], object] = lambda: None) -> None:
        """Write the merged model into a folder. A model in it is replaced, unless `make_room` moves it away.

        `make_room` is called once all files are written.
        """
        from .hf import CONFIG, save_files, write_merged

        changes = {self.names.of(name): change for name, change in self.merge.changes.items()}
        may_lack = [*map(self.names.of, self.merge.may_lack)]
        save_files(
            output,
            lambda fresh: write_merged(fresh, self.base_dir, changes, may_lack, self.adapter_dir, self.formed),
            CONFIG,
            make_room=make_room,
        )


def open_merge(
    adapter: AdapterDef,
    folder: Path,
    base: str | None,
    registry: Registry,
    notice: Callable[[str], None] | None = None,
) -> Merging:
    """Read the adapter in `folder` and find its base: `base`, else the one that its files name.

    notice: gets told if `base` has other weights than those that the adapter was trained on; None: that is an error.
    Raises ConfigError if the base cannot be found, does not fit, or is another though nobody has named it.
    """
    from .base_files import names_of_base

    merge = adapter.merge(folder)
    model = base or merge.base_model
    if not model:
        raise ConfigError(f"{folder / adapter.config_file}: names no base model. Give it: --base MODEL.")
    if not base and merge.base_revision and find_local(model) is None:
        raise ConfigError(
            f"{folder / adapter.config_file}: revision is {merge.base_revision!r}, but models are downloaded at their "
            f"main revision. Download it (hf download {model} --revision {merge.base_revision} --local-dir base) and "
            "give its folder: --base base."
        )
    where = "--base" if base else f"{folder / adapter.config_file}: its base (--base names it elsewhere)"
    base_dir = resolve_model_dir(model, [*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES], where)
    config = read_config(base_dir)
    check_base(folder, base_dir, notice if base else None)
    merge = _of_base(adapter, merge, folder, base_dir, config, registry)
    form = form_of(registry, base_dir, config)
    if QUANTIZATION in config and form is None:
        raise ConfigError(
            f"{base_dir / CONFIG_FILES[0]}: {QUANTIZATION}: the weights are stored quantized, and an adapter is merged "
            "into weights that are not, or that an installed checkpoint form reads. Give the original checkpoint of "
            "this model, in bf16 or fp32: --base MODEL."
        )
    merge.check({**config, **text_part(config)})
    names = names_of_base(base_dir, config, registry)
    if form is None:
        return Merging(base_dir, merge, names, folder)
    from .formed_weights import all_formed
    from .stored_weights import locate

    model_def, dims = named_model(config, registry, base_dir)
    tensors = [tensor for m in names.maps(model_def.weights(dims)) for tensor in m.tensors]
    return Merging(base_dir, merge, names, folder, all_formed(base_dir, locate(base_dir), form, tensors))


def _of_base(
    adapter: AdapterDef, merge: Merge, folder: Path, base_dir: Path, config: Mapping[str, Any], registry: Registry
) -> Merge:
    """Return the merge of an adapter into a base, by its parsed config.json, as far as a package builds it."""
    if adapter.of_model is None:
        return merge
    try:
        model, dims = named_model(config, registry, base_dir)
    except ConfigError:
        return merge
    return of_weights(adapter, model, dims).merge(folder)
