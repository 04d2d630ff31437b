"""Broken plugins: every fault ends in one line that names plugin, version, function and cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from made_up_plugins import Install
from typer.testing import CliRunner
from whole_plugin import (
    ADAPTER,
    BOOM,
    FORMAT,
    KERNEL,
    LAUNCHER,
    LOGGER,
    MODEL,
    OP,
    OPTIMIZER,
    RECIPE,
    the_error,
    whole_plugin,
    write_config,
)

from surogate.cli.app import app


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from whole_plugin(tmp_path, monkeypatch)


@dataclass(frozen=True)
class Broken:
    """A plugin with one fault, the command that shows it, keys of the config, and a pattern of the message."""

    patch: str
    message: str
    config: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ("plan",)


def case(name: str, patch: str, message: str, *command: str, **config: Any) -> Any:
    return pytest.param(Broken(patch, message, config, command or ("plan",)), id=name)


ADAPTED: dict[str, Any] = {"adapter": "acme", "from_scratch": False}
GPU = ("plan", "--device", "h200")
START_WRITES = """
def start(params, context):
    context.builder.emit("cast", params["head"], outs=[params["head"]], dtype=params["head"].dtype)

change("ADAPTER", start=start)
"""
START_READS = """
def start(params, context):
    b = context.builder
    b.emit("cast", b.activation("lost", (8,), "fp32"), dtype="bf16")

change("ADAPTER", start=start)
"""
LOWER_NONE = """
def lower(family, context):
    micro = dataclasses.replace(family.micro, ops=family.micro.ops[2:])
    return dataclasses.replace(family, micro=micro)

change("RECIPE", lower=lower)
"""
HALF_A_MODEL = """
def build(b, d, batch):
    b.param("idle", (4,), Init(kind="ones"))
    return MODEL_BUILD(b, d, batch)
MODEL_BUILD = MODEL.build
change("MODEL", build=build,
       weights=lambda d, w=weights: [*w(d), WeightMap("idle", (HFTensor("idle", (4,)),))])
"""
TABLE_REPORTED = """
from surogate_core.api import Metric
def build(b, d, batch):
    head = MODEL_BUILD(b, d, batch)
    return dataclasses.replace(head, metrics=[Metric("table", head.x)])
MODEL_BUILD = MODEL.build
change("MODEL", build=build)
"""
REPORTED = """
def build_loss(context, build=LOSS.build):
    loss = build(context)
    (again,) = build(context).terms
    return dataclasses.replace(loss, metrics=[dataclasses.replace(again, {})])
def build(b, d, batch, build=MODEL.build):
    return dataclasses.replace(build(b, d, batch), metrics=[Metric("spread", batch.loss_scale)])
change("LOSS", build=build_loss)
"""
STRANGE_DTYPE = 'change("MODEL", build=lambda b, d, batch: b.param("w", (8,), Init(), dtype="fp7"))'
BAD_OPTIONS = """
class OptimizerOptions(NoOptions):
    acme_rate: float = 0.1
    @field_validator("acme_rate")
    def check(cls, value):
        raise KeyError("boom")
change("OPTIMIZER", options=OptimizerOptions)
"""

SHORTENED = """
def shortened(family, part):
    program = getattr(family, part)
    return dataclasses.replace(family, **{part: dataclasses.replace(program, ops=program.ops[:-1])})
"""

LOWERED = """
def unset(family, context):
    with context.builder.record("backward") as ops:
        context.builder.apply("acme_twice", context.builder.state("acme", (4, 4), "fp32", None))
        context.builder.emit("acme_twice", ops[0].outs[0], outs=[context.builder.state("sink", (4, 4), "fp32", None)])
    return dataclasses.replace(family, micro=added(family.micro, *ops))

def writing(family, context):
    param = next(iter(context.params))
    with context.builder.record("backward") as ops:
        context.builder.emit("acme_twice", param, outs=[param])
    return dataclasses.replace(family, micro=added(family.micro, *ops))

def added(program, *ops):
    return dataclasses.replace(program, ops=(*program.ops, *ops))

mean = lambda family, context: context.builder.state("acme", (), "fp32", None, collects="mean")
other = lambda family, context: dataclasses.replace(family, clip_coef=family.micro.ops[-1].ins[-1].__class__(
    "loss_scale", (), "fp32", "input"))
mixed = lambda family, context: dataclasses.replace(family, micro=added(family.micro, {}))
swapped = lambda family, context: dataclasses.replace(family, micro=family.evaluate)
"""
STORED = (
    'context.builder.emit("cast", context.param.param, outs=[context.builder.state("head.acme", {}, "bf16", None, '
    'derived=True)], dtype="bf16")'
)

FAULTS = [
    # what a plugin's pass drops
    case(
        "lower drops a gradient",
        SHORTENED + 'change("RECIPE", lower=lambda family, context: shortened(family, "micro"))',
        f"{RECIPE} failed in lower: micro: no op writes .*grad.* any more",
        recipe="acme",
    ),
    case(
        "lower drops an update",
        SHORTENED + 'change("RECIPE", lower=lambda family, context: shortened(family, "update"))',
        f"{RECIPE} failed in lower: update: no op writes (embedding|head) any more",
        recipe="acme",
    ),
    case(
        "schedule drops a gradient",
        SHORTENED + 'change("OFFLOAD", schedule=lambda family, context: shortened(family, "micro"))',
        "offload acme of acme 0.1.0 failed in schedule: micro: no op writes .* any more",
        acme_offload="x",
    ),
    *(
        case(
            f"on_host returns {what}",
            f'change("OFFLOAD", schedule=None, on_host=lambda family, context: {result})',
            f"offload acme of acme 0.1.0 failed in on_host: returned {shown}",
            acme_offload="x",
        )
        for what, result, shown in (
            ("nothing", "[]", "nothing; raise ConfigError"),
            ("names", "['head']", "'head', expected params, gradients and states"),
            ("text", "'head'", "'h', expected params, gradients and states"),
            ("an activation", "[family.micro.ops[0].outs[0]]", "embed.*, expected params, gradients and states"),
        )
    ),
    case(
        "update ignores clip_coef",
        "def blind(context):\n"
        "    for p in context.params:\n"
        '        context.builder.emit("cast", p.grad, outs=[p.master], dtype=p.master.dtype)\n'
        'change("OPTIMIZER", update=blind)',
        rf"{OPTIMIZER} failed in update: optimizer zz: cast \(.*\) writes embedding without clip_coef",
    ),
    case(
        "update reads a state that nothing sets",
        "def unset(context):\n"
        "    for p in context.params:\n"
        '        old = context.builder.state(f"old.{p.param.name}", p.param.shape, "fp32", None)\n'
        '        x = context.builder.apply("acme_twice", old)\n'
        '        context.builder.emit("acme_sgd", x, p.master, context.clip_coef, outs=[p.master])\n'
        'change("OPTIMIZER", update=unset)',
        rf"{OPTIMIZER} failed in update: acme_twice \(.*\) reads state old.embedding, which nothing has set",
    ),
    # what a program of a plugin may not do
    *(
        case(
            f"lower {what}",
            f'{LOWERED}\nchange("RECIPE", lower={how})',
            f"{RECIPE} failed in lower: {message}",
            recipe="acme",
        )
        for what, how, message in (
            ("reads a state that nobody writes", "unset", r"acme_twice \(.*\) reads state acme, which nothing has set"),
            (
                "writes a param in a micro-step",
                "writing",
                "micro.* writes param embedding:.*; only the update may",
            ),
            (
                "collects means",
                "mean",
                ".*collects of state 'acme' is 'mean', expected sum or max",
            ),
            (
                "has another clip_coef",
                "other",
                r"returned the clip_coef loss_scale:fp32\[\], expected an fp32",
            ),
            ("has a dict among its ops", "mixed", r"micro after lower: op \d+ is \{\}, expected an Op"),
            ("returns evaluate as micro", "swapped", "returned evaluate, of stage evaluate, in place of micro"),
        )
    ),
    case(
        "update returns a value",
        'change("OPTIMIZER", update=lambda context: update(context) or 3)',
        f"{OPTIMIZER} failed in update: returned 3, expected None",
    ),
    case(
        "kept_tensors of the program",
        'change("MODEL", kept_tensors=lambda d: ["*"])',
        rf"{MODEL} failed in kept_tensors: returned '\*', which \w+ of `weights` matches: the program computes with it",
    ),
    case(
        "kept_tensors that are no patterns",
        'change("MODEL", kept_tensors=lambda d: "vision.*")',
        f"{MODEL} failed in kept_tensors: ",
    ),
    case(
        "may_lack what is not kept",
        'change("MODEL", may_lack=lambda d: ["vision.*"])',
        rf"{MODEL} failed in may_lack: returned 'vision.\*', which is no pattern of `kept_tensors`",
    ),
    case(
        "published_weights of other params",
        'change("MODEL", published_weights=lambda d: [[WeightMap("heat", (HFTensor("head", (1, 8)),))]])',
        f"{MODEL} failed in published_weights: .*published: weight maps and params differ",
    ),
    case(
        "tied_copies of unknown tensors",
        'change("MODEL", tied_copies=lambda d: {"copy": "heat"})',
        f"{MODEL} failed in tied_copies: returned .'copy': 'heat'.: heat is wrong",
    ),
    case(
        "tensors of a weight map are no tuple",
        'change("MODEL", weights=lambda d: [WeightMap("head", HFTensor("head", (1, 8)))])',
        f"{MODEL} failed in weights: .*whose 0.tensors is HFTensor.*, expected a tuple",
    ),
    *(
        case(
            f"quantize {what}",
            f'change("WEIGHT_FORMAT", quantize=lambda context: {result})',
            f"weight format acme of acme 0.1.0 failed in quantize: {message}",
            acme_weights=True,
            quantize_lm_head=True,
            acme_train="embedding",
            **ADAPTED,
        )
        for what, result, message in (
            ("declares another shape", STORED.format("(8,)"), r".*head.acme:bf16\[8\] should have shape"),
            (
                "returns what it does not write",
                "[context.builder.state('acme', (8,), 'bf16', None)]",
                "returned acme:.*not write",
            ),
        )
    ),
    case(
        "save writes nothing",
        'change("ADAPTER", save=nothing)',
        f"{ADAPTER} failed in save: wrote nothing, expected the config_file acme.json among the files",
        "train",
        **ADAPTED,
    ),
    case(
        "fuse drops a gradient",
        'change("ADAPTER", fuse=lambda program, options: dataclasses.replace(program, ops=program.ops[:-1]))',
        f"{ADAPTER} failed in fuse: micro: no op writes .* any more",
        **ADAPTED,
    ),
    # while a run is planned
    case("update raises", 'change("OPTIMIZER", update=boom)', f"{OPTIMIZER} failed in update: {BOOM}"),
    case("update forgets", 'change("OPTIMIZER", update=nothing)', f"{OPTIMIZER} failed in update: .*never writes: emb"),
    case(
        "update takes no argument",
        'change("OPTIMIZER", update=lambda: None)',
        f"{OPTIMIZER} failed in update: TypeError: .*takes 0 positional arguments",
    ),
    case(
        "update emits an unknown op",
        'change("OPTIMIZER", update=lambda context: context.builder.emit("acme_zzz"))',
        f"{OPTIMIZER} failed in update: .*no installed plugin defines op 'acme_zzz'",
    ),
    case("update exits", 'change("OPTIMIZER", update=lambda *a: exit(0))', f"{OPTIMIZER} failed in update: SystemExit"),
    case("options raise", BAD_OPTIONS, f"{OPTIMIZER} failed in options: {BOOM}", acme_rate=0.5),
    case("dims raises", 'change("MODEL", dims=boom)', f"{MODEL} failed in dims: {BOOM}"),
    case("dims misses a key", 'change("MODEL", dims=lambda c: c["x"])', f"{MODEL} failed in dims: KeyError: 'x'"),
    case("dims is None", 'change("MODEL", dims=nothing)', f"{MODEL} failed in dims: returned None, expected Dims"),
    case(
        "dims lacks a size",
        'change("MODEL", dims=lambda c: SimpleNamespace(vocab_size=7, n_layers=1))',
        f"{MODEL} failed in dims: .*max_positions is an int of at least 1",
    ),
    case("build raises", 'change("MODEL", build=boom)', f"{MODEL} failed in build: {BOOM}"),
    case(
        "build is None",
        'change("MODEL", build=nothing)',
        f"{MODEL} failed in build: returned None, expected an instance of Head",
    ),
    case(
        "build is no head",
        'change("MODEL", build=lambda b, d, batch: Head(batch.tokens, batch.tokens))',
        r"build: returned a Head, expected a Head of x \[T, C\]",
    ),
    case(
        "build reports a table",
        TABLE_REPORTED,
        r"build: returned a Head, expected a Head of .* metrics of shape \[\], or any with Metric.of",
    ),
    case(
        "a metric has the name of the loss",
        REPORTED.format('name="loss"'),
        "loss acme of acme 0.1.0 failed in build: its metric loss has the name of what is minimised. Rename one",
        loss="acme",
    ),
    case(
        "a metric has the name of one of the model",
        REPORTED.format('name="spread"') + 'change("MODEL", build=build)',
        f"{MODEL} failed in build: its metric spread has the name of a metric of loss acme of acme 0.1.0. Rename one",
        loss="acme",
    ),
    case("build has a strange dtype", STRANGE_DTYPE, f"{MODEL} failed in build: .*'w' has the unknown dtype 'fp7'"),
    *(
        case(
            f"build emits {given} as an input",
            f'change("MODEL", build=lambda b, d, batch: b.apply("acme_twice", {given}))',
            rf"{MODEL} failed in build: .*\.py:\d+: input 0 of acme_twice is {given}, expected a Value \(numbers are a",
        )
        for given in ("0.5", "None", "'tokens'")
    ),
    *(
        case(
            f"build draws from {init}",
            f'change("MODEL", build=lambda b, d, batch: b.param("w", (8,), {init}))',
            rf"{MODEL} failed in build: Init\(kind='{kind}', .*: expected zeros, ones, constant, normal with std > 0",
        )
        for init, kind in (
            ("Init(kind='normall', std=0.02)", "normall"),
            ("Init(kind='normal')", "normal"),
            ("Init(kind='uniform', std=0.02)", "uniform"),
        )
    ),
    *(
        case(
            f"build takes {init} as an init",
            f'change("MODEL", build=lambda b, d, batch: b.param("w", (8,), {init}))',
            rf"{MODEL} failed in build: .*\.py:\d+: init of param 'w' is {init}, expected an Init or None",
        )
        for init in (0, 1)
    ),
    case("a param without use", HALF_A_MODEL, f"{MODEL} failed in build: .*not used by the loss: idle"),
    case("weights raises", 'change("MODEL", weights=boom)', f"{MODEL} failed in weights: {BOOM}"),
    case(
        "weights is a generator", 'change("MODEL", weights=lambda d: (w for w in ()))', "weights: returned a generator"
    ),
    case("weights lack a param", 'change("MODEL", weights=lambda d: [])', f"{MODEL} failed in weights: .*differ"),
    case("infer raises", 'change("TWICE", infer=boom)', f"{OP} failed in infer: {BOOM}"),
    case("infer is None", 'change("TWICE", infer=nothing)', f"{OP} failed in infer: returned None, expected a list$"),
    case(
        "infer has a strange dtype",
        'change("TWICE", infer=lambda ins, attrs: [OutSpec("t", ins[0].shape, "fp7")])',
        f"{OP} failed in infer: returned .*fp7.*, expected 'fp64', 'fp32'",
    ),
    case("changes raises", 'change("TWICE", changes=boom)', f"{OP} failed in changes: {BOOM}"),
    case("changes an input it lacks", 'change("TWICE", changes=lambda *a: [1])', f"{OP} failed in changes: .*below 1"),
    case("vjp raises", 'change("TWICE", vjp=boom)', f"{OP} failed in vjp: {BOOM}"),
    case(
        "vjp is short", 'change("TWICE", vjp=lambda b, op, g: ())', rf"{OP} failed in vjp: returned \(\), expected a Va"
    ),
    case(
        "vjp gives whole numbers",
        'change("TWICE", vjp=lambda b, op, g: (b.apply("cast", g[0], dtype="int32"),))',
        rf"{OP} failed in vjp: returned .*int32.*, expected a gradient of input 0 of acme_twice .* in one of fp64",
    ),
    case(
        "vjp gives another shape",
        'change("TWICE", vjp=lambda b, op, g: (b.apply("linear_bgrad", g[0]),))',
        rf"{OP} failed in vjp: returned .*\[8\].*, expected a gradient of input 0 .* with its shape \[32, 8\]",
    ),
    case(
        "vjp ends the gradient",
        'change("TWICE", vjp=lambda b, op, g: (None,))',
        rf"{OP} failed in vjp: .*cut off by vjp of acme_twice \(block 0, .*\), which gives None: embedding",
    ),
    case(
        "rematerialize is None",
        'change("TWICE", rewrites=Rewrites(rematerialize=nothing), always_recomputed=True)',
        f"{OP} .*rematerial",
    ),
    case(
        "flops is text", 'change("TWICE", flops=lambda op: "7")', f"{OP} failed in flops: returned '7', expected an int"
    ),
    case("traffic raises", 'change("TWICE", traffic=boom)', f"{OP} failed in traffic: {BOOM}"),
    case("workspace is negative", 'change("TWICE", workspace=lambda op: -1)', f"{OP} failed in workspace: returned -1"),
    case(
        "precision raises", 'change("RECIPE", precision=boom)', f"{RECIPE} failed in precision: {BOOM}", recipe="acme"
    ),
    case(
        "precision is None",
        'change("RECIPE", precision=nothing)',
        f"{RECIPE} .*precision: returned None",
        recipe="acme",
    ),
    case(
        "precision has a strange dtype",
        'change("RECIPE", precision=lambda r, o: dataclasses.replace(FP32, master="fp7"))',
        f"{RECIPE} failed in precision: .*whose master is 'fp7', expected 'fp64'",
        recipe="acme",
    ),
    case("supports raises", 'change("RECIPE", supports=boom)', f"{RECIPE} failed in supports: {BOOM}", recipe="acme"),
    case(
        "supports is True",
        'change("RECIPE", supports=lambda *a: True)',
        f"{RECIPE} failed in supports: returned True, expected an instance of Sup",
        recipe="acme",
    ),
    case("lower raises", 'change("RECIPE", lower=boom)', f"{RECIPE} failed in lower: {BOOM}", recipe="acme"),
    case("lower is None", 'change("RECIPE", lower=nothing)', f"{RECIPE} failed in lower: returned None", recipe="acme"),
    case("lower breaks the program", LOWER_NONE, f"{RECIPE} failed in lower: .*before any op writes it", recipe="acme"),
    case("apply is None", 'change("ADAPTER", apply=nothing)', f"{ADAPTER} failed in apply: returned None", **ADAPTED),
    case("trainable raises", 'change("ADAPTER", trainable=boom)', f"{ADAPTER} failed in trainable: {BOOM}", **ADAPTED),
    case("start raises", 'change("ADAPTER", start=boom)', f"{ADAPTER} failed in start: {BOOM}", **ADAPTED),
    case(
        "start writes a weight of the model",
        START_WRITES,
        f"{ADAPTER} failed in start: writes head:fp32.*, expected params of the adapter alone",
        **ADAPTED,
    ),
    case(
        "start reads what nothing writes",
        START_READS,
        f"{ADAPTER} failed in start: start_adapter after adapter start, op 0 cast .*reads lost:.* before any op",
        **ADAPTED,
    ),
    case(
        "nothing is trainable",
        'change("ADAPTER", trainable=lambda *a: False)',
        f"{ADAPTER} failed in apply or trainable: .*depends on no trainable param",
        **ADAPTED,
    ),
    case(
        "schedule raises",
        'change("OFFLOAD", schedule=boom)',
        f"offload acme of acme 0.1.0 .*: {BOOM}",
        acme_offload="x",
    ),
    case("kernel supports raises", 'change("KERNEL", supports=boom)', f"{KERNEL} failed in supports: {BOOM}", *GPU),
    case("kernel supports is True", 'change("KERNEL", supports=lambda o, t: True)', f"{KERNEL} .*returned True", *GPU),
    case(
        "kernel workspace is None", 'change("KERNEL", workspace=nothing)', f"{KERNEL} .*workspace: returned None", *GPU
    ),
    case(
        "kernel notice is None", 'change("KERNEL", notice=nothing)', f"{KERNEL} failed in notice: returned None", *GPU
    ),
    # while data are read
    case(
        "encode raises",
        'change("FORMAT", encode=lambda r, t, o: "to" + 1)',
        rf"rows\.jsonl.*1: {FORMAT} failed in encode: TypeError: can only concatenate",
        "tokenize",
    ),
    case("encode is None", 'change("FORMAT", encode=nothing)', f"{FORMAT} failed in encode: returned None", "tokenize"),
    case(
        "encode leaves the vocabulary",
        'change("FORMAT", encode=lambda r, t, o: Encoded([9999], [True]))',
        rf"rows\.jsonl.*: {FORMAT} failed in encode: returned 1 tokens from 9999",
        "tokenize",
    ),
    case(
        "encode gives words",
        'change("FORMAT", encode=lambda r, t, o: Encoded(["to"], [True]))',
        rf"rows\.jsonl.*: {FORMAT} failed in encode: returned something other than tokens",
        "tokenize",
    ),
    case(
        "fields is text", 'change("FORMAT", fields=lambda o: "acme")', f"{FORMAT} .*fields: returned 'acme'", "tokenize"
    ),
    case("matches raises", 'change("LAUNCHER", matches=boom)', f"{LAUNCHER} failed in matches: {BOOM}"),
    case("matches is a number", 'change("LAUNCHER", matches=lambda e: 1)', f"{LAUNCHER} .*matches: returned 1"),
    # while a run trains
    case(
        "launcher raises",
        'change("LAUNCHER", join=boom)',
        f"{LAUNCHER} failed in join: {BOOM}",
        "train",
        launcher="acme",
    ),
    case(
        "launcher joins nothing",
        'change("LAUNCHER", join=nothing)',
        rf"{LAUNCHER} failed in join: returned None",
        "train",
        launcher="acme",
    ),
    case("open raises", 'change("LOGGER", open=boom)', f"{LOGGER} failed in open: {BOOM}", "train", report_to="acme"),
    case("open is None", 'change("LOGGER", open=nothing)', f"{LOGGER} .*returned None", "train", report_to="acme"),
    case(
        "reference raises",
        'change("SGD", reference="acme_reference:raises")',
        r"op acme_sgd of acme 0.1.0 failed in its reference, acme_sgd \(block -1, update, .*\): KeyError: 'boom'",
        "train",
    ),
    case(
        "reference writes to an input",
        'change("SGD", reference="acme_reference:writes")',
        r"op acme_sgd of acme 0.1.0 failed in its reference: .*wrote to its input 1, embedding:fp32\[2048,8\]",
        "train",
    ),
    case(
        "reference has another shape",
        'change("SGD", reference="acme_reference:narrow")',
        r"op acme_sgd of acme 0.1.0 failed in its reference: .*returned shape \[1, 8\]",
        "train",
    ),
    case(
        "reference is None",
        'change("SGD", reference="acme_reference:none")',
        "acme_sgd .*returned None for ou",
        "train",
    ),
    case(
        "reference cannot be differentiated",
        'change("TWICE", reference="acme_reference:raises")',
        f"{OP} failed in its reference.*KeyError: 'boom'",
        "train",
    ),
    case(
        "reference's module does not import",
        'open(__file__.replace("acme_zz", "acme_late"), "w").write("import no_such\\ndef f(x): return x")\n'
        'change("TWICE", reference="acme_late:f")',
        f"{OP} failed in its reference acme_late:f: ModuleNotFoundError: No module named 'no_such'",
        "train",
    ),
]
"""What shows when a function of a plugin runs."""


@pytest.mark.parametrize("broken", FAULTS)
def test_an_error_in_a_function_ends_in_one_line_that_names_it(
    tmp_path: Path, install: Install, broken: Broken
) -> None:
    install("acme", "0.1.0", "zz", broken.patch)
    command, *options = broken.command
    result = CliRunner().invoke(app, [command, str(write_config(tmp_path, **broken.config)), *options])
    assert re.search(broken.message, the_error(result)), result.output


@pytest.mark.parametrize(("call", "steps"), [(0, 3), (1, 3), (1, 1)], ids=["step", "evaluation", "last evaluation"])
def test_a_metric_that_fails_is_named_and_the_weights_are_saved(
    tmp_path: Path, install: Install, call: int, steps: int
) -> None:
    number = f"lambda value, calls=iter(range(99)): boom() if next(calls) == {call} else value"
    install("acme", "0.1.0", "zz", REPORTED.format(f'name="spread", of={number}'))
    path = write_config(tmp_path, loss="acme", max_steps=steps, eval_steps=1, validation_split_ratio=0.2)
    result = CliRunner().invoke(app, ["train", str(path)])
    assert re.search(f"^loss acme of acme 0.1.0 failed in metric spread: {BOOM}", the_error(result)), result.output
    assert (tmp_path / "out/step_00000001/model.safetensors").is_file()


def test_a_doubt_that_fails_ends_the_run_with_its_metric_after_saving_the_weights(
    tmp_path: Path, install: Install
) -> None:
    install("acme", "0.1.0", "zz", REPORTED.format('name="spread", doubt=lambda value: boom()'))
    result = CliRunner().invoke(app, ["train", str(write_config(tmp_path, loss="acme"))])
    assert re.search(f"^loss acme of acme 0.1.0 failed in doubt of metric spread: {BOOM}", the_error(result))
    assert (tmp_path / "out/step_00000001/model.safetensors").is_file()


def test_an_adapter_that_cannot_be_saved_ends_the_run_before_its_first_step(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", 'change("ADAPTER", save=nothing)')
    result = CliRunner().invoke(app, ["train", str(write_config(tmp_path, **ADAPTED))])
    assert "wrote nothing" in the_error(result) and "step 1/1" not in result.output


def test_the_complete_plugin_works(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", "")
    path = write_config(tmp_path, recipe="acme", report_to="acme")
    assert CliRunner().invoke(app, ["train", str(path)]).exit_code == 0
    assert (tmp_path / "out/model.safetensors").is_file()
