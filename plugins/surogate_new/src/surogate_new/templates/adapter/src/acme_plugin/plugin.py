"""An adapter for Surogate: a matrix that is added to each weight W whose output leaves a block, y = (W + D) x"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.api import (
    AdapterDef,
    Builder,
    ConfigError,
    Init,
    Merge,
    NoOptions,
    Op,
    Precision,
    Program,
    Scalars,
    WeightMap,
    provides,
)

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"adapters": 1}
CONFIG_FILE, TENSORS, ADDED = "acme_toy.json", "acme_toy.safetensors", ".added"

# ------------------------------------------------------------------------------------------------------------ in a run


def apply(
    forward: Program,
    b: Builder,
    precision: Precision,
    weights: Sequence[WeightMap],
    scalars: Scalars,
    options: NoOptions,
) -> Program:
    """Add a product to those of blocks whose weight is one tensor of the checkpoint: o and down.

    D is zero at first, so the model starts as its base. Values that are added have the label of the output, with which
    they are recomputed.
    """
    tensors = {weight.param: weight.tensors[0].name for weight in weights if len(weight.tensors) == 1}
    ops: list[Op] = []
    for op in forward.ops:
        if op.kind != "linear" or op.block < 0 or op.ins[1].name not in tensors:
            ops.append(op)
            continue
        x, weight, (y,) = op.ins[0], op.ins[1], op.outs
        with b.record("forward", op.block) as emitted:
            added = b.param(tensors[weight.name] + ADDED, weight.shape, Init(kind="zeros"), precision.adapter)
            product = b.apply("linear", *op.ins, label=y.label, **op.attrs)
            more = b.apply("linear", x, b.apply("cast", added, label=y.label, dtype=x.dtype), label=y.label)
            b.emit("add", product, more, outs=[y])
        ops += emitted
    return replace(forward, ops=tuple(ops))


# ------------------------------------------------------------------------------------------------------------ in files


def save(trained: Mapping[str, Tensor], folder: Path, base: str, options: NoOptions) -> None:
    from safetensors.torch import save_file

    save_file(dict(trained), folder / TENSORS)
    (folder / CONFIG_FILE).write_text(json.dumps({"base_model": base}))


def load(folder: Path, options: NoOptions) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    if not (folder / TENSORS).is_file():
        raise ConfigError(f"{folder}: has no {TENSORS}. Name the folder of an adapter.")
    return load_file(folder / TENSORS)


def merge(folder: Path) -> Merge:
    base = json.loads((folder / CONFIG_FILE).read_text())["base_model"]
    added = load(folder, NoOptions())
    return Merge(base, {name.removesuffix(ADDED): partial(total, added=matrix) for name, matrix in added.items()})


def total(weight: Tensor, added: Tensor) -> Tensor:
    return (weight.float() + added.float()).to(weight.dtype)


def check(folder: Path, base: Path) -> None:
    """Raise an error unless the adapter loads as its users load it. No other library knows this kind."""
    load(folder, NoOptions())


surogate_adapters = provides(
    [
        AdapterDef(
            name="acme_toy",
            summary="a matrix that is added to each weight whose output leaves a block",
            options=NoOptions,
            apply=apply,
            trainable=lambda param, stored, options: stored is None,
            save=save,
            load=load,
            merge=merge,
            config_file=CONFIG_FILE,
            library="acme-plugin",
            check=check,
            commands=lambda folder, base, options: [],
        )
    ]
)
