"""Distributions made for tests, short definitions, and a complete plugin with one definition of every kind."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surogate.config.load import LoadedConfig, load_config
from surogate_core.plugins import discovery as plugins
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import Plugin
from surogate_core.plugins.registry import Registry

Install = Callable[..., None]


def installing(folder: Path, monkeypatch: pytest.MonkeyPatch, head: str = "") -> Iterator[Install]:
    """install(distribution, version, entry name, source): an importable distribution with one plugin, in `folder`."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("SUROGATE_PLUGINS", raising=False)
    default_head = head
    before = set(sys.modules)

    def install(
        distribution: str, version: str, entry: str, source: str, head: str = default_head, group: str = "surogate"
    ) -> None:
        package = f"{distribution}_{entry}".replace("-", "_").replace(".", "_")
        (folder / f"{package}.py").write_text(head + textwrap.dedent(source))
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        target = f"{package}:command" if group == "surogate.commands" else package
        with (info / "entry_points.txt").open("a") as file:
            file.write(f"[{group}]\n{entry} = {target}\n")
        plugins._survey.cache_clear()

    plugins._survey.cache_clear()
    yield install
    plugins._survey.cache_clear()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def loaded(**keys: object) -> LoadedConfig:
    """Load a config with these keys and the plugins that are installed now."""
    return load_config({"model": "m", **keys}, registry=load_registry(), mode="train", source="run.yaml")


def outcome(registry: Registry, name: str) -> Plugin:
    """Return the plugin of this name, loaded or not."""
    return next(plugin for plugin in registry.plugins if plugin.name == name)


FIRST_PARTY = (
    "builtin",
    "surogate",
    *(
        "models",
        "bf16",
        "fp8",
        "nvfp4",
        "adamw",
        "adamw_8bit",
        "normuon",
        "lora",
        "tensorboard",
        "wandb",
        "mlflow",
    ),
    *("env", "ray", "loss_tokens", "loss_preference", "loss_distillation"),
    *("models_mistral", "models_gemma", "models_phi", "models_olmo", "models_moe", "models_hybrid", "export_gguf"),
    "models_gptoss",
    "models_muse",
    "models_mla",
    "offload_residual",
    "offload_states",
    *("nvfp4", "dora", "qlora_nf4", "qlora_fp8", "qlora_fp4", "qlora_mxfp4"),
)
"""The plugins of this repository."""

DEFINITIONS = """
import pluggy
from pydantic import BaseModel
from surogate_core.api import *
SUROGATE_API = dict.fromkeys(
    ("models", "ops", "kernels", "recipes", "lowerings", "adapters", "optimizers", "losses", "weight_formats",
     "checkpoint_forms", "export_formats", "offload_strategies", "launchers", "dataset_formats", "loggers",
     "diagnose"), 1)
hookimpl = pluggy.HookimplMarker("surogate")

def optimizer(name, options=NoOptions):
    return OptimizerDef(name=name, summary="", options=options, update=lambda *a: None)
def op(kind):
    return OpDef(kind=kind, infer=lambda ins, attrs: [], reference="surogate_core.reference.ops:up")
def kernel(op, dtypes=("fp32", "fp32"), ok=True):
    return KernelDef(op=op, dtypes=dtypes, supports=lambda o, d: Support(ok, "" if ok else "needs SM90"),
                     bind=lambda op, context: (print, ()))
def recipe(name):
    return RecipeDef(name=name, summary="", precision=lambda r, o: None,
                     supports=lambda d, p, o: Support(True), lower=lambda family, context: family)
def model(name, architecture):
    return ModelDef(name=name, summary="", architectures=(architecture,), model_types=(name,),
                    dims=lambda c: None, build=lambda b, d, i: None, weights=lambda d: ())
"""
"""The head of a plugin: functions that make definitions."""

WHOLE = """
import dataclasses, json
from types import SimpleNamespace
import pluggy
from pydantic import BaseModel, ConfigDict, Field, field_validator
from surogate_core.api import *

SUROGATE_API = dict.fromkeys(
    ("models", "ops", "kernels", "recipes", "lowerings", "adapters", "optimizers", "losses", "weight_formats",
     "checkpoint_forms", "export_formats", "offload_strategies", "launchers", "dataset_formats", "loggers",
     "diagnose"), 1)
hookimpl = pluggy.HookimplMarker("surogate")

def boom(*args):
    raise KeyError("boom")

def nothing(*args):
    return None

# ---- an op with a torch reference, one that updates, a kernel for the first

def infer(ins, attrs):
    return [OutSpec("twice", ins[0].shape, ins[0].dtype)]

TWICE = OpDef(kind="acme_twice", infer=infer, reference="acme_reference:twice")
SGD = OpDef(kind="acme_sgd", infer=lambda ins, attrs: [OutSpec("new", ins[1].shape, ins[1].dtype)],
            reference="acme_reference:sgd")
KERNEL = KernelDef(op="acme_twice", dtypes=("*", "*"),
                   supports=lambda op, target: Support(target.device.sm is not None, "needs a GPU"),
                   bind=lambda op, context: (print, ()))

# ---- a model of an embedding and a head

def dims(config):
    return SimpleNamespace(vocab_size=config["vocab_size"], n_layers=1, max_positions=64)

def build(b, d, batch):
    init = Init(kind="normal", std=0.02)
    x = b.apply("embedding", batch.tokens, b.param("embedding", (d.vocab_size, 8), init))
    with b.block(0):
        x = b.apply("acme_twice", b.apply("acme_twice", x))
    head = b.param("head", (d.vocab_size, 8), init)
    return Head(x, head)

def weights(d):
    return [WeightMap(n, (HFTensor(n, (d.vocab_size, 8)),)) for n in ("embedding", "head")]

MODEL = ModelDef(name="acme_model", summary="", architectures=("AcmeForCausalLM",), model_types=("acme",), dims=dims,
                 build=build, weights=weights, in_transformers=False)

# ---- what a run selects by name

FP32 = Precision(**dict.fromkeys((f.name for f in dataclasses.fields(Precision)), "fp32"))
RECIPE = RecipeDef(name="acme", summary="", precision=lambda request, options: FP32,
                   supports=lambda device, precision, options: Support(True), lower=lambda family, context: family)

LOWERING = LoweringDef(matmul="e4m3", gradient="e4m3", summary="", supports=lambda device, precision: Support(True),
                       lower=lambda family, context: family)

class OptimizerOptions(NoOptions):
    acme_rate: float = 0.1

def update(context):
    for p in context.params:
        context.builder.emit("acme_sgd", p.grad, p.master, context.clip_coef, outs=[p.master])

OPTIMIZER = OptimizerDef(name="zz", summary="", options=OptimizerOptions, update=update)

def build_loss(context):
    head, batch = context.head, context.batch
    return Loss([Metric("loss", context.builder.apply(
        "lm_head_ce", head.x, head.weight, batch.targets, batch.loss_scale, chunks=batch.lmhead_chunks))])

LOSS = LossDef(name="acme", summary="", build=build_loss)

class AdapterOptions(NoOptions):
    acme_train: str = "head"

def save(tensors, folder, base, options):
    from safetensors.torch import save_file
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "acme.safetensors")
    (folder / "acme.json").write_text(json.dumps({"base": base}))

def load(folder, options):
    from safetensors.torch import load_file
    return load_file(folder / "acme.safetensors")

def merge(folder):
    trained = load(folder, None)
    change = lambda name: lambda tensor: trained[name].to(tensor.dtype)
    return Merge(json.loads((folder / "acme.json").read_text())["base"], {n: change(n) for n in trained})

ADAPTER = AdapterDef(name="acme", summary="", options=AdapterOptions, config_file="acme.json", library="acme",
                     apply=lambda program, scalars, context: program,
                     trainable=lambda param, stored, options: param.name == options.acme_train,
                     save=save, load=load, merge=merge, check=lambda folder, base: None,
                     commands=lambda folder, base, options: [("acme", f"acme {folder}")])

class OffloadOptions(NoOptions):
    acme_offload: str = ""

def schedule(family, context):
    def moved(program):
        last = next(v for op in reversed(program.ops) for v in op.outs if v.role == "grad")
        with context.builder.record("backward") as ops:
            context.builder.apply("acme_twice", last, label=context.options.acme_offload)
        return dataclasses.replace(program, ops=(*program.ops, *ops))
    return family.with_micro_steps(moved)

OFFLOAD = OffloadDef(name="acme", summary="", options=OffloadOptions, schedule=schedule,
                     selected=lambda options: bool(options.acme_offload))

class WeightOptions(NoOptions):
    acme_weights: bool = False

def quantize(context):
    b, matrix = context.builder, context.param.param
    stored = b.state(f"{matrix.name}.acme", matrix.shape, "bf16", None, derived=True)
    return b.emit("cast", matrix, outs=[stored], dtype="bf16")

def dequantize(stored, context):
    return context.builder.apply("cast", *stored, label="weight", dtype=context.param.param.dtype)

def load_weight(tensor, parts, options):
    import torch
    return [parts[tensor.name].view(torch.bfloat16)]

def save_weight(tensor, states, dtype, options):
    import torch
    return {tensor.name: states[0].view(torch.uint8)}

CHECKPOINTS = CheckpointForm(matches=lambda config: config.get("quant_method") == "acme", check=nothing,
                             parts=lambda name, options: [name], load=load_weight, save=save_weight,
                             config=lambda kept, options: {"quant_method": "acme"})
WEIGHT_FORMAT = WeightFormatDef(name="acme", summary="", options=WeightOptions, key="acme_weights", quantize=quantize,
                                dequantize=dequantize, checkpoints=CHECKPOINTS)

def change_form(**fields):
    change("WEIGHT_FORMAT", checkpoints=dataclasses.replace(CHECKPOINTS, **fields))

def form_parts(tensor, config):
    return [Part(tensor.name, tensor.shape, ("uint8",))]

def read_form(tensor, parts, rows, config):
    return parts[tensor.name][rows.start:rows.stop].float() / 1000

def matches_form(config):
    return config.get("quant_method") == "ours"

CHECKPOINT_FORM = CheckpointFormDef(name="acme", summary="", matches=matches_form, check=nothing, parts=form_parts,
                                    read=read_form)

def write_list(context, folder):
    text = json.dumps({name: list(tensor.shape) for name, tensor in context.tensors.items()})
    (folder / f"model.{context.type}").write_text(text)

EXPORT_FORMAT = ExportFormatDef(name="acme", summary="", types=("list", "other"), check=nothing, write=write_list,
                                identified_by="model.*")

class LauncherOptions(NoOptions):
    acme_record: str = ""

def join(here, options):
    if options.acme_record:
        open(options.acme_record, "a").write(f"{here.device_count} device\\n")
    return World()

LAUNCHER = LauncherDef(name="acme", summary="", options=LauncherOptions, join=join)

class FormatOptions(NoOptions):
    acme_field: str = "acme"

FORMAT = DatasetFormatDef(name="acme", summary="", options=FormatOptions, matches=lambda columns: "acme" in columns,
                          fields=lambda options: [options.acme_field],
                          encode=lambda row, tokenizer, options: Encoded([5, 6, 7], [True] * 3))

LOGGER = LoggerDef(name="acme", summary="", open=lambda info, options: SimpleNamespace(
    report=nothing, close=nothing))

def change(_, **fields):
    globals()[_] = dataclasses.replace(globals()[_], **fields)

@hookimpl
def surogate_ops(): return [TWICE, SGD]
@hookimpl
def surogate_kernels(): return [KERNEL]
@hookimpl
def surogate_models(): return [MODEL]
@hookimpl
def surogate_recipes(): return [RECIPE]
@hookimpl
def surogate_lowerings(): return [LOWERING]
@hookimpl
def surogate_adapters(): return [ADAPTER]
@hookimpl
def surogate_optimizers(): return [OPTIMIZER]
@hookimpl
def surogate_losses(): return [LOSS]
@hookimpl
def surogate_offload_strategies(): return [OFFLOAD]
@hookimpl
def surogate_weight_formats(): return [WEIGHT_FORMAT]
@hookimpl
def surogate_checkpoint_forms(): return [CHECKPOINT_FORM]
@hookimpl
def surogate_export_formats(): return [EXPORT_FORMAT]
@hookimpl
def surogate_launchers(): return [LAUNCHER]
@hookimpl
def surogate_dataset_formats(): return [FORMAT]
@hookimpl
def surogate_loggers(): return [LOGGER]

"""
"""The source of a plugin that works. Appending `change("MODEL", build=boom)` breaks one function."""

REFERENCE = """
def twice(x):
    return x * 2

def sgd(grad, master, clip_coef):
    return master - 0.01 * grad * clip_coef if clip_coef.isfinite() else master

def raises(*ins):
    raise KeyError("boom")

def writes(grad, master, clip_coef):
    return master.sub_(grad)

def narrow(grad, master, clip_coef):
    return master[:1]

def none(*ins):
    return None
"""
"""The module with the references of WHOLE."""
