"""Checks of checkpoint forms. An example is a `quantization_config`. Tensors are drawn as `parts` says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate_core.api import DTYPES, CheckpointFormDef, HFTensor, Part
from surogate_core.errors import ConfigError
from surogate_core.reference.rounding import TORCH_DTYPES

from ..bench import Bench, differing, shown
from ..check import NotApplicable, proves

Config = Mapping[str, Any]

SHAPES = ((64, 64), (128, 64), (300, 200))
"""Of matrices. A form may refuse some of them."""
OTHERS: Sequence[Config] = ({}, {"quant_method": "of_another_form"}, {"quant_method": None}, {"quant_method": ["a"]})


def _configs(definition: CheckpointFormDef, bench: Bench) -> list[dict[str, Any]]:
    configs = bench.subject.examples(definition)
    if not configs:
        where = f'SUROGATE_EXAMPLES = {{"checkpoint form {definition.name}": [{{"quant_method": ...}}]}}'
        raise NotApplicable(f"nothing says which quantization_config it matches. Give one: {where}")
    return configs


def _matrices(definition: CheckpointFormDef, config: Config) -> Iterator[tuple[HFTensor, dict[str, Tensor]]]:
    """Yield matrices with their parts."""
    for shape in SHAPES:
        tensor = HFTensor("model.layers.0.mlp.up_proj.weight", shape)
        if parts := _parts(definition, tensor, config):
            yield tensor, {part.name: drawn(part, seed) for seed, part in enumerate(parts)}


def _parts(definition: CheckpointFormDef, tensor: HFTensor, config: Config) -> Sequence[Part]:
    try:
        return definition.parts(tensor, config)
    except ConfigError:
        return ()


def drawn(part: Part, seed: int) -> Tensor:
    """Return a tensor as a part is described, so that weights are small."""
    generator = torch.Generator().manual_seed(seed)
    dtype, stored = TORCH_DTYPES[part.dtypes[0]], part.dtypes[0]
    if stored == "ue8m0":
        return torch.exp2(-torch.randint(6, 9, part.shape, generator=generator).float()).to(dtype)
    if DTYPES[stored].has_grad:
        return ((0.5 + torch.rand(part.shape, generator=generator)) / 256).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(part.shape, generator=generator).to(dtype)
    return torch.randint(0, 128, part.shape, generator=generator).to(dtype)


def other(part: Tensor) -> Tensor:
    """Return a part with other values in all elements."""
    if part.dtype == torch.float8_e8m0fnu:
        return (2 * part.float()).to(part.dtype)
    return (-part.float() if part.is_floating_point() else part + 1).to(part.dtype)


@proves("checkpoint form", remedy="Compare quant_method, and what tells the form from others of the same method.")
def it_matches_the_config_of_its_own_files_alone(definition: CheckpointFormDef, bench: Bench) -> None:
    for config in _configs(definition, bench):
        assert definition.matches(config), f"does not match its example, {config!r:.80}"
        definition.check(config)
        rivals = [f.name for f in bench.registry.checkpoint_forms().values() if f.matches(config)]
        assert rivals == [definition.name], f"{', '.join(rivals)} match {config!r:.80}"
    for foreign in OTHERS:
        assert not definition.matches(foreign), f"matches {foreign!r}"


@proves("checkpoint form", remedy="Return the rows in fp32, [len(rows), *tensor.shape[1:]], in a tensor of their own.")
def it_reads_matrices_in_floating_point_and_changes_no_part(definition: CheckpointFormDef, bench: Bench) -> None:
    for config in _configs(definition, bench):
        found = list(_matrices(definition, config))
        assert found, f"parts refuses matrices of {' and '.join(str(list(shape)) for shape in SHAPES)}"
        for tensor, parts in found:
            before, rows = {name: part.clone() for name, part in parts.items()}, range(tensor.shape[0])
            one, again = (definition.read(tensor, parts, rows, config) for _ in range(2))
            assert one.is_floating_point() and tuple(one.shape) == tensor.shape, (
                f"returns {one.dtype} {list(one.shape)} for {list(tensor.shape)}"
            )
            assert bool(one.isfinite().all()), "returns NaN or inf"
            assert torch.equal(one, again), "a second call returns other values"
            bits = [{n: x.contiguous().reshape(-1).view(torch.uint8) for n, x in of.items()} for of in (before, parts)]
            assert not differing(*bits), f"changes {shown(differing(*bits))}"


@proves(
    "checkpoint form", remedy="Take the rows of the scales that belong to `rows`, which may begin inside of a block."
)
def rows_that_are_read_alone_are_those_of_the_whole(definition: CheckpointFormDef, bench: Bench) -> None:
    for config in _configs(definition, bench):
        for tensor, parts in _matrices(definition, config):
            height = tensor.shape[0]
            whole = definition.read(tensor, parts, range(height), config)
            for rows in (range(1), range(height - 1, height), range(3, height // 2 + 1), range(height // 3, height)):
                alone = definition.read(tensor, parts, rows, config)
                assert torch.equal(alone, whole[rows.start : rows.stop]), (
                    f"rows {rows.start} to {rows.stop - 1} of {list(tensor.shape)} are others when they are read alone"
                )


@proves("checkpoint form", remedy="Multiply by every scale, or list what the weights do not need in `ignored`.")
def every_part_changes_what_is_read(definition: CheckpointFormDef, bench: Bench) -> None:
    for config in _configs(definition, bench):
        for tensor, parts in _matrices(definition, config):
            rows = range(tensor.shape[0])
            whole = definition.read(tensor, parts, rows, config)
            for name, part in parts.items():
                read = definition.read(tensor, {**parts, name: other(part)}, rows, config)
                assert not torch.equal(read, whole), f"other values in {name} change nothing"


@proves("checkpoint form", remedy="Compute a weight from its parts and the config alone.")
def a_run_has_the_bits_of_one_on_the_values_that_it_reads(definition: CheckpointFormDef, bench: Bench) -> None:
    for config in _configs(definition, bench):
        folders = _stored(definition, bench, config)
        keys = {"from_scratch": False, "model_dtype": "bf16", "max_steps": 2, "save_steps": 2, "learning_rate": 1e-3}
        one, read = (bench.train(**keys, model=str(folder)) for folder in folders)
        assert one.losses == read.losses, f"the loss is {read.losses[1]!r}, and {one.losses[1]!r} on the values"
        wrong = differing(one.tensors(2), read.tensors(2))
        assert not wrong, f"{shown(wrong)} differ after 2 steps"


def _stored(definition: CheckpointFormDef, bench: Bench, config: Config) -> tuple[Path, Path]:
    """Return a model in floating point, and the same in the form."""
    base = bench.base("bf16")
    plain: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        tensor = HFTensor(name, tuple(weight.shape))
        parts = _parts(definition, tensor, config) if weight.ndim == 2 and ".layers." in name else ()
        held = {part.name: drawn(part, seed) for seed, part in enumerate(parts, len(stored))}
        read = definition.read(tensor, held, range(len(weight)), config) if held else weight
        plain[name] = read.to(weight.dtype).contiguous()
        stored |= held or {name: weight}
    folders = bench._new("plain"), bench._new("stored")
    for folder, tensors, more in zip(folders, (plain, stored), ({}, {"quantization_config": config}), strict=True):
        for path in (path for path in base.glob("*.json") if path.is_file()):
            (folder / path.name).write_bytes(path.read_bytes())
        given = json.loads((base / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**given, **more}))
        save_file(tensors, folder / "model.safetensors")
    return folders
