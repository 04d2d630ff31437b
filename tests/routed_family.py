"""A plugin of one file: a model of one block in which a router mixes experts, with a router loss whose weight is an
option. `docs/write-a-plugin/family.md` shows its parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field
from torch import Tensor

from surogate_core.api import (
    BatchInputs,
    Builder,
    Head,
    HFTensor,
    Init,
    Metric,
    ModelDef,
    NoOptions,
    OpDef,
    OutSpec,
    WeightMap,
    accumulator,
    provides,
)

SUROGATE_API = {"ops": 1, "models": 1}
CONFIG = {
    "architectures": ["AcmeRoutedForCausalLM"],
    "model_type": "acme_routed",
    "vocab_size": 2048,
    "hidden_size": 16,
}
EXPERTS = 4
TOKENIZER = Path(__file__).parents[1] / "examples/tiny-qwen3"


class RoutedOptions(NoOptions):
    """Keys of a run of this family."""

    acme_balance_weight: float = Field(0.01, ge=0, description="Weight of the loss that balances the experts.")


@dataclass(frozen=True)
class RoutedDims:
    vocab_size: int
    d_model: int
    balance: float = 0.0
    n_layers: int = 1
    max_positions: int = 128


def routed(x: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
    """x times the mean of the experts [E, C], which the softmax of the logits [T, E] weights."""
    return (x * (logits.softmax(-1) @ experts.to(logits.dtype))).to(x.dtype)


def balance(logits: Tensor, targets: Tensor, loss_scale: Tensor, *, weight: float) -> Tensor:
    """weight E sum_e share_e sum_t p_te loss_scale, over the labelled rows t. share_e: of those that choose e first."""
    rows = logits[targets >= 0].softmax(-1)
    share = rows.argmax(-1).bincount(minlength=rows.shape[1]) / max(len(rows), 1)
    return weight * rows.shape[1] * (share.to(rows.dtype) * rows.sum(0)).sum() * loss_scale


def dims(config: Mapping[str, Any]) -> RoutedDims:
    return RoutedDims(config["vocab_size"], config["hidden_size"])


def configure(d: RoutedDims, options: RoutedOptions) -> RoutedDims:
    return replace(d, balance=options.acme_balance_weight)


def build(b: Builder, d: RoutedDims, batch: BatchInputs) -> Head:
    params = {name: b.param(name, shape, INITS.get(name, NORMAL)) for name, shape in shapes(d).items()}
    x = b.apply("embedding", batch.tokens, params["embedding"])
    with b.block(0):
        logits = b.apply("linear", x, params["router"], label="router_logits", dtype=accumulator(x.dtype))
        x = b.apply("add", x, b.apply("acme_routed", x, logits, params["experts"]), label="residual")
        weight = {"weight": d.balance}
        losses = [b.apply("acme_balance", logits, batch.targets, batch.loss_scale, **weight)] if d.balance else []
    return Head(x, params["head"], losses=losses, metrics=[Metric("balance", loss) for loss in losses])


NORMAL = Init(kind="normal", std=0.5)
INITS = {
    "router": Init(kind="log_uniform", low=0.01, high=16.0),
    "experts": Init(kind="values", values=(-0.3, -0.1, 0.1, 0.3)),
}


def shapes(d: RoutedDims) -> dict[str, tuple[int, int]]:
    vocabulary, mixed = (d.vocab_size, d.d_model), (EXPERTS, d.d_model)
    return {"embedding": vocabulary, "router": mixed, "experts": mixed, "head": vocabulary}


def weights(d: RoutedDims) -> Sequence[WeightMap]:
    return [WeightMap(name, (HFTensor(f"{name}.weight", shape),)) for name, shape in shapes(d).items()]


OPS = [
    OpDef(
        kind="acme_routed",
        infer=lambda ins, attrs: [OutSpec("routed", ins[0].shape, ins[0].dtype)],
        reference=f"{__name__}:routed",
    ),
    OpDef(
        kind="acme_balance",
        infer=lambda ins, attrs: [OutSpec("balance", (), ins[0].dtype)],
        attrs={"weight": float},
        reference=f"{__name__}:balance",
    ),
]
MODEL = ModelDef(
    name="acme_routed",
    summary="experts that a router mixes, with a router loss",
    architectures=("AcmeRoutedForCausalLM",),
    model_types=("acme_routed",),
    dims=dims,
    build=build,
    weights=weights,
    options=RoutedOptions,
    configure=configure,
    recompute={"recompute_ffn": frozenset({"router_logits"})},
    in_transformers=False,
)
surogate_ops = provides(OPS)
surogate_models = provides([MODEL])


def write_config(folder: Path, model: dict[str, Any] = CONFIG, **changes: Any) -> Path:
    """Write a run.yaml that trains the made-up family of `routed_family` for two steps."""
    (folder / "model").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / "model" / name)
    (folder / "model/config.json").write_text(json.dumps(model))
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 64)
    base = {
        "plugins": [__file__],
        "model": str(folder / "model"),
        "from_scratch": True,
        "model_dtype": "fp32",
        "max_steps": 2,
        "save_steps": 1,
        "sequence_len": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "validation_split_ratio": 0,
        "datasets": [{"path": str(folder / "text.txt"), "type": "text"}],
        "output_dir": str(folder / "out"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(base | changes))
    return folder / "run.yaml"
