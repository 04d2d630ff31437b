"""Definitions that are wrong when they are loaded: one message in a run and in `surogate plugins`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_plugins import Install
from typer.testing import CliRunner
from whole_plugin import TOKENIZER, the_error, whole_plugin, write_config

from surogate.cli.app import app


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from whole_plugin(tmp_path, monkeypatch)


WRONG_DEFINITIONS = [
    (
        "import fails",
        "import no_such_module",
        "import of acme_zz failed: ModuleNotFoundError: No module named 'no_such",
    ),
    ("import exits", "exit(0)", "import of acme_zz failed: SystemExit: 0"),
    ("one number for all hooks", "SUROGATE_API = 0", "acme_zz has SUROGATE_API = 0, not a number for each hook"),
    ("a newer hook", "SUROGATE_API['ops'] = 7", "acme_zz is written for version 7 of surogate_ops, surogate-core"),
    ("hook raises", "surogate_ops = hookimpl(lambda: boom())", "failed in surogate_ops(): KeyError: 'boom'"),
    ("hook exits", "@hookimpl\ndef surogate_ops(): exit(3)", "failed in surogate_ops(): SystemExit: 3"),
    ("hook is None", "@hookimpl\ndef surogate_models(): pass", "surogate_models(): TypeError: 'NoneType' object"),
    (
        "hook of another kind",
        "@hookimpl\ndef surogate_models(): return [SGD]",
        "returned OpDef in its list, expected Mod",
    ),
    (
        "hook is misspelt",
        "@hookimpl\ndef surogate_modell(): return []",
        "surogate_modell(): is an unknown hook; did you",
    ),
    (
        "no function",
        'change("OPTIMIZER", update=3)',
        "surogate_optimizers(): OptimizerDef.update is 3, expected a func",
    ),
    (
        "no options class",
        'change("OPTIMIZER", options=OptimizerOptions())',
        "OptimizerDef.options is OptimizerOptions(",
    ),
    (
        "one architecture as text",
        'change("MODEL", architectures="Acme")',
        "ModelDef.architectures is 'Acme', expected a",
    ),
    ("name is a number", 'change("RECIPE", name=8)', "surogate_recipes(): RecipeDef.name is 8, expected text"),
    (
        "truncation unknown",
        'change("FORMAT", truncation="cut")',
        "DatasetFormatDef.truncation is 'cut', expected 'split' or 'delete'",
    ),
    (
        "reference without module",
        'change("SGD", reference="acme_gone:sgd")',
        "'acme_gone:sgd': there is no module acme_",
    ),
    (
        "name is empty",
        'change("RECIPE", name="")',
        "surogate_recipes(): RecipeDef.name is '', expected text without",
    ),
    (
        "a pair in place of pairs",
        'change("RECIPE", products=("bf16", "bf16"))',
        "RecipeDef.products.0 is 'bf16', expected a tuple",
    ),
    (
        "pairs of unknown dtypes",
        'change("RECIPE", products=(("bf16", "fp7"),))',
        "RecipeDef.products.0.1 is 'fp7', expected 'fp64', 'fp32'",
    ),
    ("share is text", 'change("SGD", zero_copy="x")', "OpDef.zero_copy is 'x', expected a number"),
    (
        "share in percent",
        'change("KERNEL", memory_efficiency=80)',
        "KernelDef.memory_efficiency is 80, expected less than or equal to 1",
    ),
    (
        "attention without sizes",
        'change("SGD", attention="forward")',
        "is attention and lacks the attributes head_dim and seq_len, by which plans price it",
    ),
    (
        "kind of a param is unknown",
        'change("SGD", param_kinds={0: "emb"})',
        "OpDef.param_kinds.0 is 'emb', expected 'matrix', 'embedding', 'head', 'vector' or 'router'",
    ),
    (
        "no function in a form",
        "change_form(load=3)",
        "WeightFormatDef.checkpoints.load is 3, expected a function",
    ),
    (
        "number as a pattern",
        'change("CHECKPOINT_FORM", ignored=[1])',
        "CheckpointFormDef.ignored.0 is 1, expected text",
    ),
    (
        "one type as text",
        'change("EXPORT_FORMAT", types="f32")',
        "ExportFormatDef.types is 'f32', expected a",
    ),
    (
        "a type with a colon",
        'change("EXPORT_FORMAT", types=("f:32",))',
        "export format 'acme' has ':' in 'f:32'",
    ),
    (
        "key of no option",
        'change("WEIGHT_FORMAT", key="acme_weight")',
        "WeightFormatDef.key is 'acme_weight', expected an option of type bool, False by default",
    ),
    (
        "key that is true by default",
        'change("WEIGHT_FORMAT", options=type("O", (NoOptions,), {"__annotations__": {"acme_weights": bool}, '
        '"acme_weights": True}))',
        "WeightFormatDef.key is 'acme_weights', expected an option of type bool, False by default",
    ),
    (
        "default out of bounds",
        'change("OPTIMIZER", options=type("O", (NoOptions,), {"__annotations__": {"acme_rate": float}, '
        '"acme_rate": Field(-3.0, ge=0)}))',
        "options of optimizer 'zz': a default is refused: acme_rate: -3.0: Input should be greater than or equal to 0",
    ),
    (
        "proposed is a mapping",
        'change("OFFLOAD", proposed={"acme_offload": "x"})',
        "OffloadDef.proposed is {'acme_offload': 'x'}, expected a list",
    ),
    (
        "proposed has no option",
        'change("OFFLOAD", proposed=[{"acme_of": "x"}])',
        "OffloadDef.proposed has acme_of; options: acme_offload",
    ),
    (
        "proposed has a wrong value",
        'change("OFFLOAD", proposed=[{"acme_offload": 3}])',
        "OffloadDef.proposed has a value that is refused: acme_offload: 3: Input should be a valid string",
    ),
    ("reference without function", 'change("SGD", reference="acme_reference:gone")', "acme_reference has no gone"),
    ("reference malformed", 'change("SGD", reference="acme_reference")', "is not of the form module:function"),
    (
        "option is a key of core",
        'change("OPTIMIZER", options=type("O", (NoOptions,), {"__annotations__": {"model": str}, "model": ""}))',
        "surogate_optimizers(): option 'model' of optimizer 'zz' is a key of the config itself",
    ),
    (
        "name with spaces",
        'change("RECIPE", name="my recipe")',
        "RecipeDef.name is 'my recipe', expected text without",
    ),
    (
        "kernel for a dtype",
        'change("KERNEL", dtypes=("fp7", "*"))',
        "KernelDef.dtypes.0 is 'fp7', expected '*', '..",
    ),
    (
        "kernel of no package",
        'change("KERNEL", module="acme_gone._C")',
        "KernelDef.module is 'acme_gone._C', which is in no package",
    ),
    (
        "options that ignore keys",
        'change("OPTIMIZER", options=type("O", (BaseModel,), {}))',
        "options of optimizer 'zz' lack ConfigDict(extra=\"forbid\")",
    ),
    (
        "option without a default",
        'change("OPTIMIZER", options=type("O", (NoOptions,), {"__annotations__": {"acme_rate": float}}))',
        "options of optimizer 'zz': acme_rate has no default",
    ),
    ("offload without functions", 'change("OFFLOAD", schedule=None)', "OffloadDef has neither on_host nor schedule"),
    ("launcher without functions", 'change("LAUNCHER", join=None)', "LauncherDef has neither join nor start, so it"),
]


@pytest.mark.parametrize(("patch", "message"), [pytest.param(p, t, id=i) for i, p, t in WRONG_DEFINITIONS])
def test_a_wrong_definition_has_the_same_message_in_a_run_and_in_plugins_and_stops_no_other_run(
    tmp_path: Path, install: Install, patch: str, message: str
) -> None:
    install("acme", "0.1.0", "zz", patch)
    needs = the_error(CliRunner().invoke(app, ["plan", str(write_config(tmp_path, datasets=[]))]))
    assert "acme 0.1.0" in needs and message in needs

    listed = CliRunner().invoke(app, ["plugins", "--json"])
    (plugin,) = [entry for entry in json.loads(listed.output)["plugins"] if entry["distribution"] == "acme"]
    assert listed.exit_code == 2 and plugin["state"] in ("broken", "wrong API") and plugin["reason"] in needs

    other = CliRunner().invoke(
        app, ["plan", str(write_config(tmp_path, optimizer="adamw", model=str(TOKENIZER), datasets=[]))]
    )
    assert other.exit_code == 0 and message in other.output and "warning: " in other.output


def test_a_plugin_that_imports_torch_and_a_kernel_for_no_op_are_named(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    patch = 'import sys\nsys.modules["torch"] = sys\nchange("KERNEL", op="acme_gone")'
    install("acme", "0.1.0", "zz", patch)
    notices = json.loads(CliRunner().invoke(app, ["plugins", "--json"]).output)["notices"]
    assert [notice.split(",")[0] for notice in notices] == [
        "plugin 'zz' of acme 0.1.0 imports torch when it is loaded",
        "plugin 'zz' of acme 0.1.0 has a kernel for op 'acme_gone'",
    ]
    assert all(notice.split()[-1] in CliRunner().invoke(app, ["plugins"]).output for notice in notices)
