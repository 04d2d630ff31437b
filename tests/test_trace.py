"""The order of passes, what `surogate plugins trace` says that each of them does, and `surogate plan --diff`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tracking
from made_up_plugins import Install
from models import harness
from typer.testing import CliRunner, Result
from whole_plugin import MODEL, OPTIMIZER, whole_plugin, write_config

from surogate import run
from surogate.cli.app import app
from surogate.reporting.program_listing import listing
from surogate_conformance.trace import Traced, traced
from surogate_core import __version__
from surogate_core.assembly import assemble
from surogate_core.assembly.assemble import PASSES, trace
from surogate_core.planning.plan import Plan
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_qlora_mxfp4.format import MXFP4
from surogate_qlora_mxfp4.options import Mxfp4WeightOptions
from surogate_recipes_bf16.recipe import BF16

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart.yaml"
BASE = {"model": str(ROOT / "examples/tiny-qwen3"), "model_dtype": "bf16", "gradient_accumulation_steps": "2"}
TUNED = {"from_scratch": "false", "lora": "true"}
RUNS: Mapping[str, dict[str, str]] = {
    "bf16": {"sample_packing": "true", "attn_bwd_chunks": "2"},
    "recomputed": {"recompute": "true", "offload_residual": "true", "offload_optimizer": "true"},
    "long": {**TUNED, "sequence_len": "512", "per_device_train_batch_size": "128", "row_tiles": "32768"},
    "fp8": {"recipe": "fp8-hybrid", "numerics_report_steps": "2"},
    "stored": {**TUNED, "qlora_bnb": "true", "recipe": "fp8-hybrid", "recompute": "true"},
    "started": {"from_scratch": "false", "adapter": "dora", "qlora_bnb": "true", "loss": "dpo"},
    "level 1": {"gpus": "4", "recipe": "fp8-hybrid"},
    "level 3": {"gpus": "2", "zero_level": "3", "offload_optimizer": "true"},
}


def planned(keys: Mapping[str, str]) -> Plan:
    gpus = int(keys.get("gpus", 1))
    given = {**BASE, **keys}
    loaded = run.load(QUICKSTART, [f"{key}={value}" for key, value in given.items() if key != "gpus"])
    return run.plan(loaded, "h200", gpus)


@pytest.fixture(scope="module")
def traces() -> Mapping[str, tuple[Plan, list[Traced]]]:
    found = {}
    for name, keys in RUNS.items():
        plan = planned(keys)
        found[name] = plan, traced(trace(plan.inputs).passed.passes)
    return found


def trace_of(*args: object) -> Result:
    return CliRunner().invoke(app, ["plugins", "trace", *map(str, args)])


def diff_of(*args: object) -> Result:
    return CliRunner().invoke(app, ["plan", str(QUICKSTART), "--device", "h200", *map(str, args)])


# ------------------------------------------------------------------------------------------------- the order of passes


def test_every_listed_pass_that_makes_programs_runs_in_the_listed_order(
    traces: Mapping[str, tuple[Plan, list[Traced]]],
) -> None:
    tracking_recipe = {"ops": {**harness.OPS, **tracking.OPS}, "recipe": tracking.tracking(BF16)}
    tracked = traced(trace(harness.plan_inputs(harness.tiny_config(), **tracking_recipe)).passed.passes)
    experts = harness.tiny_config(model_type="gpt_oss", hidden_size=64, intermediate_size=64, num_local_experts=4)
    stored = {"weight_format": (MXFP4, Mxfp4WeightOptions(qlora_mxfp4=True)), "decoded_experts": 1 << 14}
    tuned = {"adapters": [(LORA, LoraOptions())], **stored}
    decoded = traced(trace(harness.plan_inputs(experts, **tuned)).passed.passes)
    ran = set()
    for passes in (tracked, decoded, *(passes for _, passes in traces.values())):
        places = [PASSES.index(one.ran.step) for one in passes]
        assert places == sorted(places)
        ran |= {*places}
    assert [step for place, step in enumerate(PASSES) if step.of and place not in ran] == []


def test_what_is_listed_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a listed pass has the program that others leave."""
    whole, names = trace(planned(RUNS["bf16"]).inputs), ("fuse_adds", "documents")
    monkeypatch.setattr(assemble, "PASSES", tuple(step for step in PASSES if step.name not in names))
    shorter = trace(planned(RUNS["bf16"]).inputs)
    assert {ran.name for ran in whole.passed.passes} - {ran.name for ran in shorter.passed.passes} == {*names}
    assert whole.variants and not shorter.variants


def test_the_documentation_has_the_passes_in_their_order() -> None:
    table = (ROOT / "docs/how-a-step-runs.md").read_text().split("| pass |")[1].split("\n\n")[0]
    documented = re.findall(r"^\| ([a-z_ ]+) \|", table, re.M)
    assert documented == list(dict.fromkeys(step.name for step in PASSES))


def test_only_a_trace_keeps_programs(traces: Mapping[str, tuple[Plan, list[Traced]]]) -> None:
    for plan, _ in traces.values():
        assert all(ran.programs is None for ran in plan.assembly.passed.passes)


def test_a_trace_is_of_the_programs_that_were_planned(traces: Mapping[str, tuple[Plan, list[Traced]]]) -> None:
    for name, (plan, _) in traces.items():
        again = trace(plan.inputs)
        assert {n: listing(p) for n, p in again.all_programs.items()} == {
            n: listing(p) for n, p in plan.assembly.all_programs.items()
        }, name


# ------------------------------------------------------------------------------------------------------- what they did


def test_changes_add_up_to_the_programs(traces: Mapping[str, tuple[Plan, list[Traced]]]) -> None:
    """Kinds of ops before a pass, with its changes, are those after it."""
    for name, (_, passes) in traces.items():
        for one in passes:
            before, after = one.ran.programs or (None, None)
            kinds = Counter(op.kind for op in before.ops) if before else Counter()
            for change in one.changes:
                was, _, becomes = change.op.partition(" -> ")
                if change.what == "dropped" or becomes:
                    kinds[was] -= change.count
                if change.what == "added" or becomes:
                    kinds[becomes or was] += change.count
            assert after is not None
            assert +kinds == Counter(op.kind for op in after.ops), (name, one.ran.name, after.name)


def found(passes: list[Traced], name: str, program: str) -> dict[tuple[str, str], tuple[int, str]]:
    """Return {(what, kind of op): (ops, whose)} of a pass."""
    one = next(one for one in passes if (one.ran.name, one.ran.program) == (name, program))
    return {(c.what, c.op): (c.count, str(c.by or "core")) for c in one.changes}


def test_each_change_is_of_the_plugin_that_made_it(traces: Mapping[str, tuple[Plan, list[Traced]]]) -> None:
    _, stored = traces["stored"]
    model, lora = "model qwen3 of surogate-models 0.2.0", "adapter lora of surogate-lora 0.2.0"
    format, recipe = "weight format nf4 of surogate-qlora-nf4 0.2.0", "recipe fp8-hybrid of surogate-recipe-fp8 0.2.0"
    assert found(stored, "build", "forward")["added", "linear"] == (16, model)
    assert found(stored, "adapter", "forward")["added", "linear"] == (32, lora)
    assert found(stored, "fuse_adds", "forward")["changed", "add -> linear_pair"] == (16, "core")
    differentiated = found(stored, "differentiate", "micro")
    assert differentiated["added", "attention_bwd"] == (4, "core")
    assert differentiated["added", "qk_norm_rope_bwd"] == (4, "op qk_norm_rope of surogate-models 0.2.0")
    assert found(stored, "store", "derive")["added", "nf4_quantize"] == (16, format)
    assert found(stored, "lower", "micro")["changed", "linear_pair -> fp8_linear_add"] == (16, recipe)
    assert found(stored, "read stored", "micro")["added", "nf4_to_e4m3"][1] == format
    assert found(stored, "fuse", "micro")["changed", "lora_unpack -> lora_wgrad"] == (4, lora)
    update = found(stored, "optimizer", "update")
    assert update["added", "global_norm"] == (1, "core")
    _, moved = traces["recomputed"]
    assert found(moved, "offload", "micro")["added", "move"][1] == "offload residual of surogate-offload-residual 0.2.0"
    assert found(moved, "recompute", "micro")["added", "qk_norm_rope"] == (4, "core")
    assert found(moved, "stream", "update")["added", "move"][1] == "core"


def test_ops_of_blocks_that_are_alike_are_counted_once(traces: Mapping[str, tuple[Plan, list[Traced]]]) -> None:
    lines = trace_of(QUICKSTART, "--device", "h200").stdout.splitlines()
    assert lines[:4] == [
        "build: the model records its ops",
        "  forward, by model qwen3 of surogate-models 0.2.0",
        "    +     1  embedding",
        "    +     1  rmsnorm",
    ]
    assert "    + 4 x 4  linear" in lines and "    +     8  add_rmsnorm" in lines
    assert "    + 2 x 4 + 1  rmsnorm_bwd" in lines
    assert "  micro, evaluate, update, derive, start: no change" in lines


def test_the_trace_names_the_packages_of_ops_and_of_what_runs_them() -> None:
    shown = json.loads(trace_of(QUICKSTART, "--device", "h200", "--json").stdout)
    kernels = {one["op"]: one for one in shown["kernels"]}
    assert kernels["linear"] == {
        "op": "linear",
        "count": 32,
        "op_of": "surogate-core",
        "kernel_of": "surogate-recipe-bf16",
    }
    assert kernels["qk_norm_rope"]["op_of"] == "surogate-models"
    assert shown["device"] == "h200" and shown["refusals"] == {}
    built = shown["passes"][0]
    assert built["by"] == {"kind": "model", "name": "qwen3", "distribution": "surogate-models", "version": __version__}
    linear = next(change for change in built["changes"] if change["op"] == "linear")
    assert linear["blocks"] == {"0": 4, "1": 4, "2": 4, "3": 4} and linear["count"] == 16
    on_cpu = json.loads(trace_of(QUICKSTART, "--device", "cpu", "--json").stdout)
    assert {one["kernel_of"] for one in on_cpu["kernels"]} == {"reference"}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from whole_plugin(tmp_path, monkeypatch)


def test_definitions_of_a_third_party_are_named(tmp_path: Path, install: Install) -> None:
    drops = "lower=lambda family, context: dataclasses.replace(family, evaluate=swapped(family.evaluate))"
    swapped = "def swapped(p):\n    return dataclasses.replace(p, ops=(p.ops[0], *p.ops[1:3], *p.ops[3:]))\n"
    install("acme", "0.1.0", "zz", f'{swapped}change("RECIPE", {drops})')
    done = trace_of(write_config(tmp_path, recipe="acme"), "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert f"  forward, by {MODEL}\n    + 1  embedding\n    + 2  acme_twice" in done.stdout
    assert f"  update, by {OPTIMIZER}\n    + 1  global_norm, by core\n    + 2  acme_sgd" in done.stdout
    assert "+ 2  reference_vjp" in done.stdout
    assert re.search(r"acme_twice +\d+ +acme +reference", done.stdout)


def test_a_trace_imports_no_torch() -> None:
    code = (
        "import sys\nfrom surogate.cli.app import app\n"
        f"try: app(['plugins', 'trace', {str(QUICKSTART)!r}, '--device', 'h200'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---------------------------------------------------------------------------------------------------------------- diff


def test_a_diff_shows_blocks_that_are_alike_once() -> None:
    one, every = (diff_of("--diff", "recompute", "--set", "recompute=true", *option) for option in ((), ("--all",)))
    assert one.exit_code == every.exit_code == 0
    lines = one.stdout.splitlines()
    assert lines[:2] == ["--- micro before recompute", "+++ micro after recompute"]
    assert lines[-1] == "  blocks 2, 3: as block 1"
    added = [re.sub(r":[a-z0-9]+\[[0-9,]*\]", "", line) for line in lines if line.startswith("+b1")]
    assert added[0] == "+b1   recompute 1.norm#3, 1.rstd#3 = rmsnorm(1.residual, layers.1.attn.norm) eps=1e-06"
    assert not any(line.startswith(("+b2", "+b3")) for line in lines)
    assert len(re.findall(r"^\+b3   recompute", every.stdout, re.M)) == len(
        re.findall("^.b1   recompute", one.stdout, re.M)
    )
    assert "as block" not in every.stdout


def test_a_diff_names_the_plugin_of_the_pass_and_programs_that_do_not_change() -> None:
    lines = diff_of("--diff", "lower", "--set", "recipe=fp8-hybrid", "--set", "model_dtype=bf16").stdout.splitlines()
    recipe = "recipe fp8-hybrid of surogate-recipe-fp8 0.2.0"
    heads = [line for line in lines if line.startswith("+++")]
    assert heads == [f"+++ {p} after lower, {recipe}" for p in ("micro", "evaluate", "update", "derive", "calibrate")]
    assert f"  start: lower, {recipe} changes no line" in lines
    assert diff_of("--diff", "build").stdout.startswith(
        "--- nothing before build\n+++ forward after build, model qwen3"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--diff", "lowr"],
            "--diff lowr: this run has no such pass. Its passes: build, loss, fuse_adds, differentiate, evaluation",
        ),
        (["--diff", "recompute"], "--diff recompute: this run has no such pass"),
        (["--diff", "lower", "--json"], "--diff and --json: --diff prints nothing but a diff. Give one"),
        (["--diff", "lower", "--fit", "auto"], "--diff and --fit"),
        (["--all"], "--all: is of a diff. Add --diff PASS"),
    ],
)
def test_a_diff_of_nothing_is_refused_in_one_line(args: list[str], message: str) -> None:
    done = diff_of(*args)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", [["nowhere.yaml"], [], [QUICKSTART, "--device", "h999"]])
def test_a_trace_of_no_run_is_refused(args: list[Any]) -> None:
    done = trace_of(*args)
    assert done.exit_code == 2 and "Traceback" not in done.output
