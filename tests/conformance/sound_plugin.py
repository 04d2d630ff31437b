"""A plugin in one file that passes every check, with definitions of most kinds. `test_planted_faults.py` breaks it.
Its model and optimizer are those of `plugins/example_third_party`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from acme_surogate.mlp import MLP, SQUARED_RELU
from acme_surogate.sgd import SGD, SGD_OP

from surogate_core.api import (
    AdapterDef,
    CheckpointForm,
    CheckpointFormDef,
    ConfigError,
    DatasetFormatDef,
    Encoded,
    ExportContext,
    ExportFormatDef,
    HFTensor,
    KernelDef,
    LauncherDef,
    Logger,
    LoggerDef,
    Loss,
    LossContext,
    LossDef,
    Merge,
    Metric,
    NoOptions,
    OffloadDef,
    OpDef,
    OutSpec,
    Part,
    Precision,
    RecipeDef,
    Report,
    StepReport,
    Support,
    WeightFormatDef,
    World,
)

SUROGATE_API = {
    **{"models": 1, "ops": 1, "kernels": 1, "recipes": 1, "optimizers": 1, "adapters": 1, "weight_formats": 1},
    **{"offload_strategies": 1, "dataset_formats": 1, "loggers": 1, "launchers": 1, "losses": 1},
    **{"checkpoint_forms": 1, "export_formats": 1},
}
SUROGATE_EXAMPLES = {
    "optimizer acme_sgd": [{"learning_rate": 0.1}],
    "op acme_squared_relu": [{"ins": ["fp32[6,8]"]}],
    "checkpoint form acme": [{"quant_method": "acme8"}],
}


def launch(*arguments: Any) -> None:
    """A compiled function."""


KERNEL = KernelDef(
    op="acme_squared_relu",
    dtypes=("*", "*"),
    supports=lambda op, target: Support(target.device.sm is not None, "needs a GPU"),
    bind=lambda op, context: context.call(launch, op.ins[0], op.outs[0], op.ins[0].size),
)


def precision(request: Any, options: Any) -> Precision:
    model = request.model_dtype or "bf16"
    given = {f.name: getattr(request, f"{f.name}_dtype", None) for f in dataclasses.fields(Precision)}
    default = {"adapter": "fp32", "param_grad": "fp32", "optimizer_state": "fp32"}
    return Precision(**{name: dtype or default.get(name, model) for name, dtype in given.items()})


RECIPE = RecipeDef(
    name="acme",
    summary="every value in one dtype",
    precision=precision,
    supports=lambda device, precision, options: Support(True),
    lower=lambda family, context: family,
)

# --------------------------------------------------------------------------------------------- an adapter: the LM head


class AdapterOptions(NoOptions):
    acme_train: str = "lm_head"


def save(tensors: Any, folder: Path, base: str, options: Any) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "acme.safetensors")
    (folder / "acme.json").write_text(json.dumps({"base": base}))


def load(folder: Path, options: Any) -> Any:
    from safetensors.torch import load_file

    if not (folder / "acme.json").exists():
        raise ConfigError(f"{folder}: has no acme.json")
    return load_file(folder / "acme.safetensors")


def merge(folder: Path) -> Merge:
    trained = load(folder, None)
    changes = {name: (lambda tensor, new=new: new.to(tensor.dtype)) for name, new in trained.items()}
    return Merge(json.loads((folder / "acme.json").read_text())["base"], changes)


ADAPTER = AdapterDef(
    name="acme",
    summary="trains the LM head",
    options=AdapterOptions,
    apply=lambda program, scalars, context: program,
    trainable=lambda param, stored, options: param.name == options.acme_train,
    save=save,
    load=load,
    merge=merge,
    config_file="acme.json",
    library="acme",
    check=lambda folder, base: None,
    commands=lambda folder, base, options: [("acme", f"acme {folder}")],
)

# ------------------------------------------------------------------------------ a weight format: 8 bits, scales of rows


class WeightOptions(NoOptions):
    acme_int8: bool = False


INT8 = OpDef(
    kind="acme_int8",
    infer=lambda ins, attrs: [
        OutSpec("codes", ins[0].shape, "uint8"),
        OutSpec("scale", (ins[0].shape[0], 1), "fp32"),
    ],
    reference="sound_references:int8",
)
FROM_INT8 = OpDef(
    kind="acme_from_int8",
    infer=lambda ins, attrs: [OutSpec("weight", ins[0].shape, attrs["dtype"])],
    reference="sound_references:from_int8",
    attrs={"dtype": str},
)


def quantize(context: Any) -> Any:
    b, matrix = context.builder, context.param.param
    name, shape = matrix.name, matrix.shape
    codes = b.state(f"{name}.codes", shape, "uint8", None, derived=True)
    scale = b.state(f"{name}.scale", (shape[0], 1), "fp32", None, derived=True)
    return b.emit("acme_int8", matrix, outs=[codes, scale])


def dequantize(stored: Any, context: Any) -> Any:
    return context.builder.apply("acme_from_int8", *stored, label="weight", dtype=context.param.param.dtype)


CHECKPOINTS = CheckpointForm(
    matches=lambda config: config.get("quant_method") == "acme",
    check=lambda config, options: None,
    parts=lambda name, options: [name, f"{name}.scale"],
    load=lambda tensor, parts, options: [parts[tensor.name], parts[f"{tensor.name}.scale"]],
    save=lambda tensor, states, dtype, options: {tensor.name: states[0], f"{tensor.name}.scale": states[1]},
    config=lambda kept, options: {"quant_method": "acme"},
)
WEIGHT_FORMAT = WeightFormatDef(
    name="acme",
    summary="8 bits",
    options=WeightOptions,
    key="acme_int8",
    quantize=quantize,
    dequantize=dequantize,
    checkpoints=CHECKPOINTS,
    bits=8.5,
)

# ---------------------------------------------------------------------------- a checkpoint form: 8 bits, scales of rows


def parts(tensor: HFTensor, config: Any) -> list[Part]:
    return [Part(tensor.name, tensor.shape, ("uint8",)), Part(f"{tensor.name}.scale", (tensor.shape[0],), ("fp32",))]


def read(tensor: HFTensor, parts: Any, rows: range, config: Any) -> Any:
    codes, scale = (parts[name][rows.start : rows.stop].float() for name in (tensor.name, f"{tensor.name}.scale"))
    return (codes - 64) * scale[:, None]


FORM = CheckpointFormDef(
    name="acme",
    summary="8 bits",
    matches=lambda config: config.get("quant_method") == "acme8",
    parts=parts,
    read=read,
)

# -------------------------------------------------------------------- an export format: a header, and all tensors in it


def check(context: ExportContext) -> None:
    for tensor in context.tensors.values():
        if tensor.shape[-1] % 2:
            raise ConfigError(f"acme: {tensor.name} has {tensor.shape[-1]} columns, an odd number. Use --format hf.")


def write(context: ExportContext, folder: Path) -> None:
    shapes = {name: tensor.shape for name, tensor in context.tensors.items()}
    with (folder / f"model.{context.type}").open("wb") as file:
        file.write(json.dumps([shapes, context.config, context.stops]).encode())
        for done, tensor in enumerate(context.tensors.values(), start=1):
            file.write((tensor[...].float() if context.type == "f32" else tensor[...].half()).numpy().tobytes())
            context.progress(done, len(context.tensors))


EXPORT = ExportFormatDef(
    name="acme", summary="one file", types=("f32", "f16"), check=check, write=write, identified_by="model.*"
)

# ------------------------------------------------------------------------------------------------------------- the rest


class OffloadOptions(NoOptions):
    acme_offload: bool = False


OFFLOAD = OffloadDef(
    name="acme",
    summary="optimizer states on the host",
    options=OffloadOptions,
    selected=lambda options: options.acme_offload,
    on_host=lambda family, context: context.optimizer_states,
    proposed=({"acme_offload": True},),
)


def encode(row: Any, tokenizer: Any, options: Any) -> Encoded:
    text = row["acme"]
    if not isinstance(text, str):
        raise ConfigError(f"column 'acme' holds {text!r:.40}, not text")
    tokens = tokenizer.encode_ids(text)
    return Encoded(tokens, [True] * len(tokens))


FORMAT = DatasetFormatDef(
    name="acme",
    summary="text",
    options=NoOptions,
    matches=lambda columns: "acme" in columns,
    fields=lambda options: ["acme"],
    encode=encode,
)


class Lines(Logger):
    def __init__(self, file: Path) -> None:
        self.file = file

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            with self.file.open("a") as file:
                file.write(f"{report.step} {report.loss}\n")


LOGGER = LoggerDef(name="acme", summary="lines", open=lambda info, options: Lines(info.output_dir / "acme.txt"))
LAUNCHER = LauncherDef(name="acme", summary="one process", join=lambda here, options: World())


def cross_entropy(c: LossContext) -> Loss:
    chunks = c.batch.lmhead_chunks
    loss = c.builder.apply("lm_head_ce", c.head.x, c.head.weight, c.batch.targets, c.batch.loss_scale, chunks=chunks)
    return Loss([Metric("loss", loss)])


LOSS = LossDef(name="acme_ce", summary="cross-entropy", build=cross_entropy, in_nats=True)
MODEL, OP, OPTIMIZER, UPDATE = MLP, SQUARED_RELU, SGD, SGD_OP


def change(_: str, **fields: Any) -> None:
    """Replace a definition of this module by a copy with other fields."""
    globals()[_] = dataclasses.replace(globals()[_], **fields)


def hook(*names: str) -> Any:
    import pluggy

    return pluggy.HookimplMarker("surogate")(lambda: [globals()[name] for name in names])


surogate_models = hook("MODEL")
surogate_ops = hook("OP", "UPDATE", "INT8", "FROM_INT8")
surogate_kernels = hook("KERNEL")
surogate_recipes = hook("RECIPE")
surogate_optimizers = hook("OPTIMIZER")
surogate_losses = hook("LOSS")
surogate_adapters = hook("ADAPTER")
surogate_weight_formats = hook("WEIGHT_FORMAT")
surogate_checkpoint_forms = hook("FORM")
surogate_export_formats = hook("EXPORT")
surogate_offload_strategies = hook("OFFLOAD")
surogate_dataset_formats = hook("FORMAT")
surogate_loggers = hook("LOGGER")
surogate_launchers = hook("LAUNCHER")
