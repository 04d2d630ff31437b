"""Checks of export formats. An example is keys of the tiny config.json of a model that the format can hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate.checkpoints.export import Export
from surogate.checkpoints.export_source import Source
from surogate.checkpoints.formed_weights import FormedWeights
from surogate.runs.chosen_format import Chosen
from surogate_core.api import ExportFormatDef
from surogate_core.errors import ConfigError

from ..bench import Bench, quiet
from ..check import proves

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
Files = Mapping[str, bytes]


def _model(definition: ExportFormatDef, bench: Bench) -> Path:
    """Return the folder of a tiny model in bf16."""
    example = next(iter(bench.subject.examples(definition)), {})

    def make() -> Path:
        drawn = bench.drawn(bench.model, {**bench.config_of(bench.model)[0], **example})
        folder = bench._new("finished") / "model"
        shutil.copytree(drawn, folder)
        tensors = {name: weight.bfloat16() for name, weight in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return folder

    return Path(bench.once(("finished", example), make))


def _all_types(definition: ExportFormatDef) -> tuple[str, ...]:
    return definition.types or ("",)


def _types(definition: ExportFormatDef, bench: Bench) -> tuple[str, ...]:
    """Return the types that hold the tiny model: the first one, and others that are not for other models alone."""
    first, *others = _all_types(definition)
    model = _model(definition, bench)
    return first, *(kind for kind in others if _refusal(definition, bench, model, kind) is None)


def _adapter(bench: Bench, model: Path) -> Path:
    """Return the folder of a LoRA adapter of two matrices of a model, in the form of PEFT."""
    folder = bench._new("adapter")
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    matrices = [(name, x) for name, x in load_file(model / WEIGHTS).items() if name.endswith("_proj.weight")]
    for name, x in matrices[:2]:
        key = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(2, x.shape[1], generator=generator)
        tensors[f"{key}.lora_B.weight"] = torch.randn(x.shape[0], 2, generator=generator)
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    modules = [name.removesuffix(".weight") for name, _ in matrices[:2]]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _export(
    definition: ExportFormatDef,
    bench: Bench,
    model: Path,
    kind: str,
    named: Path | None = None,
    adapter: Path | None = None,
) -> Export:
    if definition.of_adapters and adapter is None:
        adapter = _adapter(bench, model)
    return Export(
        adapter=adapter,
        named=named or model,
        source=Source(model, FormedWeights(model)),
        chosen=Chosen(definition, kind),
        registry=bench.registry,
        notice=lambda line: None,
    )


def _written(
    definition: ExportFormatDef,
    bench: Bench,
    model: Path,
    kind: str,
    named: Path | None = None,
    adapter: Path | None = None,
) -> Files:
    """Export a model as `surogate export` does. Return the files. named: the folder that the user named."""
    output = bench._new("exported") / "same-name"  # a file may hold the name
    output.mkdir()
    with quiet():
        _export(definition, bench, model, kind, named, adapter).write(output, lambda names: None)
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def _changed(model: Path, name: str, bench: Bench, file: str = WEIGHTS) -> Path:
    """Return a copy of a model or an adapter with other values in one tensor."""
    folder = bench._new("changed") / "model"
    shutil.copytree(model, folder)
    tensors = load_file(folder / file)
    tensors[name] = -(tensors[name] + 1)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


@proves("export format", remedy="Write what follows from the context alone: no times, paths or random names.")
def a_model_has_the_same_files_every_time(definition: ExportFormatDef, bench: Bench) -> None:
    for kind in _types(definition, bench):
        one, again = (_written(definition, bench, _model(definition, bench), kind) for _ in range(2))
        assert one, "writes no file"
        wrong = sorted(name for name in one.keys() | again.keys() if one.get(name) != again.get(name))
        assert not wrong, f"{wrong[0]} differs in a second export"


@proves("export format", remedy="Write every tensor of `context.tensors`, or refuse the model in `check`.")
def every_tensor_reaches_the_files(definition: ExportFormatDef, bench: Bench) -> None:
    model, kind = _model(definition, bench), _all_types(definition)[0]
    if definition.of_adapters:
        adapter = _adapter(bench, model)
        whole = _written(definition, bench, model, kind, adapter=adapter)
        for name in load_file(adapter / ADAPTER):
            changed = _changed(adapter, name, bench, ADAPTER)
            assert _written(definition, bench, model, kind, adapter=changed) != whole, (
                f"other values in {name} change nothing"
            )
        return
    whole = _written(definition, bench, model, kind)
    for name in load_file(model / WEIGHTS):
        assert _written(definition, bench, _changed(model, name, bench), kind) != whole, (
            f"other values in {name} change nothing"
        )


@proves("export format", remedy="Read tensors from `context.tensors` and other files from `context.folder`.")
def it_reads_the_model_through_its_context(definition: ExportFormatDef, bench: Bench) -> None:
    """The folder that the user names holds other weights: those of a base, into which an adapter is merged."""
    model, kind = _model(definition, bench), _all_types(definition)[0]
    name = next(iter(load_file(model / WEIGHTS)))
    named = _changed(model, name, bench)
    found = _written(definition, bench, model, kind, named)
    assert found == _written(definition, bench, model, kind), "the folder in `context.source` changes the files"


@proves("export format", remedy="Compute what `check` needs from the config, the shapes and the files of the folder.")
def its_check_reads_no_weights_and_writes_nothing(definition: ExportFormatDef, bench: Bench) -> None:
    model = _model(definition, bench)
    for kind in _types(definition, bench):
        output = bench._new("checked")
        with _export(definition, bench, model, kind).context(output) as context:
            before = _contents(context.folder)
            definition.check(replace(context, tensors={n: _Unread(t) for n, t in context.tensors.items()}))
            assert _contents(context.folder) == before, "changes the files of the model"
            assert [path for path in output.iterdir() if path != context.folder] == [], "writes files"


@proves("export format", remedy="Raise ConfigError in `check`, with the value and a format that can hold the model.")
def what_it_cannot_hold_is_told_before_anything_is_written(definition: ExportFormatDef, bench: Bench) -> None:
    """Models with sizes that few formats hold: each is refused by `check`, or written."""
    config = json.loads((_model(definition, bench) / "config.json").read_text())
    odd: list[dict[str, Any]] = [{"intermediate_size": 100}, {"hidden_size": 72}, {"intermediate_size": 33}]
    for sizes in odd:
        model = bench.drawn(bench.model, {**config, **sizes})
        for kind in _all_types(definition):
            refusal = _refusal(definition, bench, model, kind)
            if refusal is None:
                _written(definition, bench, model, kind)
            else:
                assert refusal.endswith((".", "?")) and "\n" not in refusal, f"refuses {sizes} with {refusal!r:.200}"


def _refusal(definition: ExportFormatDef, bench: Bench, model: Path, kind: str) -> str | None:
    """Return why a format does not hold a model, by `check`; None: it does."""
    with _export(definition, bench, model, kind).context(bench._new("checked")) as context:
        try:
            definition.check(context)
        except ConfigError as error:
            return str(error)
    return None


def _contents(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Unread:
    """A tensor that may not be read."""

    def __init__(self, tensor: Any) -> None:
        self.name, self.shape, self.dtype, self.by_rows = tensor.name, tensor.shape, tensor.dtype, tensor.by_rows

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        raise AssertionError(f"reads {self.name}")
