"""An adapter for Surogate: a factor for each output of attention and MLP, as in IA3, on a frozen base"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    AdapterDef,
    Builder,
    ConfigError,
    Init,
    Merge,
    NoOptions,
    Op,
    OpDef,
    OutSpec,
    Precision,
    Program,
    Scalars,
    Value,
    WeightMap,
    provides,
)

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = 0
CONFIG_FILE, TENSORS, FACTORS = "acme_toy.json", "acme_toy.safetensors", ".factors"

# ------------------------------------------------------------------------------------------------------------ in a run


def acme_toy_scale(y: Tensor, factors: Tensor) -> Tensor:
    """The reference: y [T, N] * factors [N]."""
    return (y.float() * factors.float()).to(y.dtype)


def infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec(ins[0].label, ins[0].shape, ins[0].dtype)]


SCALE = OpDef(
    kind="acme_toy_scale", infer=infer, reference=f"{__name__}:acme_toy_scale", flops=lambda op: op.outs[0].size
)


def apply(
    forward: Program,
    b: Builder,
    precision: Precision,
    weights: Sequence[WeightMap],
    scalars: Scalars,
    options: NoOptions,
) -> Program:
    """Scale the outputs of the products of blocks whose weight is one tensor of the checkpoint: o and down."""
    tensors = {weight.param: weight.tensors[0].name for weight in weights if len(weight.tensors) == 1}
    ops: list[Op] = []
    for op in forward.ops:
        if op.kind != "linear" or op.block < 0 or op.ins[1].name not in tensors:
            ops.append(op)
            continue
        (y,) = op.outs
        with b.record("forward", op.block) as emitted:
            name = tensors[op.ins[1].name] + FACTORS
            factors = b.param(name, y.shape[1:], Init(kind="ones"), precision.adapter)
            product = b.apply("linear", *op.ins, label=y.label, **op.attrs)
            b.emit("acme_toy_scale", product, factors, outs=[y])
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
    """The factor of an output is that of a row of the weight."""
    base = json.loads((folder / CONFIG_FILE).read_text())["base_model"]
    factors = load(folder, NoOptions())
    changes = {name.removesuffix(FACTORS): partial(scaled, factors=rows) for name, rows in factors.items()}
    return Merge(base, changes)


def scaled(weight: Tensor, factors: Tensor) -> Tensor:
    return (weight.float() * factors.float()[:, None]).to(weight.dtype)


def check(folder: Path, base: Path) -> None:
    """Raise an error unless the adapter loads as its users load it. No other library knows this kind."""
    load(folder, NoOptions())


surogate_ops = provides([SCALE])
surogate_adapters = provides(
    [
        AdapterDef(
            name="acme_toy",
            summary="a factor for each output of attention and MLP",
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
