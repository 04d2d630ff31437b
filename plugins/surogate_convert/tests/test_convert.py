"""Configs of other trainers become configs that are planned and trained, and no key is lost without a word."""

from __future__ import annotations

import ast
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from surogate import run
from surogate_convert.convert import Converted, convert
from surogate_convert.rules import TOOLS, read_table, rules_of, tool
from surogate_core.api import ConfigError

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = sorted(path for path in HERE.glob("configs/*/*") if path.is_file())
PROGRAM = Path(sys.prefix) / "bin/surogate"
OF_ENTRIES = {"max_prompt_tokens", "chat_template_kwargs"}
"""Keys of entries of datasets, which are moved there."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with as many positions as the configs ask for."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(ROOT / "examples/tiny-qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def test_there_are_five_configs_of_each_tool() -> None:
    assert all(sum(path.parent.name == name for path in FILES) >= 5 for name in TOOLS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_config_is_recognised_and_its_conversion_is_planned(path: Path, model: Path, tmp_path: Path) -> None:
    done = convert(path)
    assert done.tool.name == path.parent.name
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(done.config))
    loaded = run.load(tmp_path / "run.yaml", [f"model={model}"])
    plan = run.plan(loaded, "h200", gpus=8 if "zero_level" in done.config else 1)
    assert plan.report.fits
    assert plan.inputs.seq_len == done.config["sequence_len"]


def values_of(tree: Any) -> int:
    """Count the values of nested mappings and lists: numbers, words, lists of words."""
    if isinstance(tree, dict) and tree:
        return sum(map(values_of, tree.values()))
    if isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        return sum(map(values_of, tree))
    return 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_value_of_a_file_is_converted_or_named(path: Path) -> None:
    done = convert(path)
    assert done.converted + len(done.missing) + len(done.unneeded) == len(done.leaves)
    assert all(said for _, said in (*done.missing, *done.unneeded))
    if path.suffix in (".yaml", ".yml"):
        described = [leaf for leaf in done.leaves if leaf.place[0] == "dataset_info.json"]
        assert len(done.leaves) - len(described) == values_of(yaml.safe_load(path.read_text()))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The schema of each key."""
    printed = subprocess.run([PROGRAM, "schema"], check=True, capture_output=True).stdout
    return dict(json.loads(printed)["properties"])


@pytest.mark.parametrize("name", [*TOOLS, "arguments", "calls", "launchers"])
def test_a_table_sets_keys_that_exist_to_values_that_they_take(name: str, schema: dict[str, Any]) -> None:
    rules = rules_of(read_table(name))
    pairs: list[tuple[str, Any]] = []
    if name in TOOLS:
        found = tool(name)
        rules = {**found.keys, **{f"{key} of pairs": rule for key, rule in found.preference.items()}}
        for rows in (found.defaults, found.adapter, found.script, found.script_adapter, *found.losses.values()):
            pairs += [(key, value) for key, (value, _) in rows.items() if value is not None]
    for rule in rules.values():
        pairs += rule.sets.items()
        assert rule.to in {"", "{loss}_beta", *OF_ENTRIES, *schema}
        for value in rule.values.values():
            pairs += value.items() if isinstance(value, dict) else [(rule.to, value)]
    pairs = [(key, value) for key, value in pairs if key not in OF_ENTRIES]
    pairs = [(key, value) for key, value in pairs if (key, value) != ("loss", "cpo")]  # refused, unless it is SimPO
    assert not [key for key, _ in pairs if key not in schema]
    jsonschema = pytest.importorskip("jsonschema")
    for key, value in pairs:
        jsonschema.validate(value, schema[key])


@pytest.mark.parametrize("name", [*TOOLS, "arguments", "calls", "launchers"])
def test_a_rule_says_one_fate_and_yields_to_keys_that_exist(name: str) -> None:
    rules = tool(name).keys if name in TOOLS else rules_of(read_table(name))
    for key, rule in rules.items():
        assert (
            rule.unneeded or rule.missing or rule.refused or rule.by or rule.to or rule.sets or rule.values or rule.says
        )
        assert not (rule.unneeded and (rule.missing or rule.refused or rule.to or rule.sets)), key
        assert all(other in {**rules, **tool("trl").keys} for other in rule.yields), key


def test_a_key_that_is_renamed_has_a_hint_in_a_config_of_surogate(tmp_path: Path) -> None:
    """A user who writes it there is told which key it is."""
    renamed = {
        key for name in TOOLS for key, rule in tool(name).keys.items() if (rule.to or rule.sets) and "." not in key
    }
    ours = {"model", "output_dir"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "m"} | dict.fromkeys(renamed - ours, 1)))
    with pytest.raises(ConfigError) as caught:
        run.load(tmp_path / "run.yaml")
    assert "lora_r: unknown key; did you mean lora_rank?" in str(caught.value)
    assert "unknown key; the config reference" not in str(caught.value)


def notes(done: Converted) -> dict[str, str]:
    return dict([*done.differs, *done.missing])


def converted(tmp_path: Path, text: str, name: str = "run.yaml", tool: str | None = None) -> Converted:
    (tmp_path / name).write_text(text)
    return convert(tmp_path / name, tool)


def test_what_differs_in_meaning_is_said(tmp_path: Path) -> None:
    done = converted(tmp_path, "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nwarmup_steps: 0.1\nlora_r: 4\n")
    assert done.config["warmup_ratio"] == 0.1 and "warmup_steps" not in done.config
    assert done.config["lora_target_modules"] == ["q_proj", "v_proj"] and done.config["lora_rank"] == 4
    assert done.config["loss_scale"] == "all" and "every token" in notes(done)["loss_scale"]
    assert "8 rows of 1024 tokens" in notes(done)["gpus"]
    assert {"lora_target_modules", "learning_rate", "per_device_train_batch_size"} <= {*done.added}


def test_what_has_no_counterpart_is_named_with_its_value(tmp_path: Path) -> None:
    text = "base_model: m\nval_set_size: 200\noptimizer: lion\nnum_epochs: 0\nmade_up: 3\nneftune_noise_alpha: 5\n"
    told = notes(converted(tmp_path, text))
    assert told["val_set_size"].startswith("200:") and told["num_epochs"].startswith("0:")
    assert told["optimizer"] == "lion: is not built; optimizer may be adamw, adamw_8bit, normuon"
    assert told["made_up"] == "3: is unknown to surogate convert"
    assert told["neftune_noise_alpha"] == "5: not built; remove it"


def test_datasets_of_llamafactory_are_looked_up(tmp_path: Path) -> None:
    done = convert(HERE / "configs/llamafactory/full_ds3.yaml")
    assert done.config["datasets"] == [
        {
            "path": "llamafactory/glaive_toolcall_en",
            "type": "conversation",
            "messages_field": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        }
    ]
    assert done.config["zero_level"] == 3
    text = "model_name_or_path: m\nstage: sft\ndataset: mine\ntemplate: qwen3\n"
    assert "mine: is not in data/dataset_info.json" in notes(converted(tmp_path, text))["dataset"]


def test_the_command_line_of_unsloth_has_defaults_of_its_own(tmp_path: Path) -> None:
    line = "python unsloth-cli.py --model_name a/b --dataset rows.jsonl --save_model --save_method lora\n"
    config = converted(tmp_path, line, "run.sh").config
    assert (config["qlora_bnb"], config["max_steps"], config["merge_adapter"]) == (False, 400, False)
    assert config["datasets"][0]["type"] == "instruction" and not config["datasets"][0]["use_chat_template"]
    config = converted(
        tmp_path, "trl sft --model_name_or_path m --packing --packing_strategy bfd_split\n", "a.sh"
    ).config
    assert (config["truncation_strategy"], config["sample_packing"]) == ("split", True)


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    text = "from unsloth import FastLanguageModel as F\nopen('ran', 'w')\nrank = 8\nlr = float(input())\n"
    text += "F.from_pretrained('a/b-bnb-4bit', max_seq_length=64)\nF.get_peft_model(m, r=rank)\n"
    text += "SFTConfig(learning_rate=lr)\n"
    done = converted(tmp_path, text, "train.py")
    assert (done.config["model"], done.config["lora_rank"], done.config["qlora_bnb"]) == ("a/b", 8, True)
    assert notes(done)["learning_rate"] == "line 7: is computed by the script; set learning_rate"
    assert done.config["learning_rate"] == 5e-5 and "learning_rate" in done.added, "as if it were not set"
    assert not (tmp_path / "ran").exists()
    code = "".join(path.read_text() for path in (HERE.parent / "src").rglob("*.py"))
    called = {node.func.id for node in ast.walk(ast.parse(code.replace("from __future__ import annotations", "")))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    assert not called & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model: m\nrl: grpo\n", "rl: grpo is not converted. dpo, ipo, .*docs/preference.md"),
        ("model_name_or_path: m\nstage: ppo\ntemplate: x\n", "stage: ppo is not converted. sft, pt, dpo, kto and rm"),
        ("model_name_or_path: m\nstage: dpo\npref_loss: odpo\n", "pref_loss: odpo is a loss that is not built"),
        (
            "model: m\nmodel_class: llm\ntemplate: x\ndist_config: {name: fsdp2}\n",
            "LLaMA-Factory v1, whose configs are",
        ),
        ("base_model: m\nlearning_rate: 1\nlearning_rate: 2\n", "learning_rate is given twice; keep one"),
        ("a: 1\n", "has no key of axolotl, TRL, LLaMA-Factory, Unsloth"),
        ("learning_rate: 1\n", "Say which: --from"),
        ("model: m\ndatasets: [{path: p}]\nsequence_len: 8\n", "keys of a config of Surogate. .* surogate train"),
        (  # torchtune
            "output_dir: o\ntokenizer: {}\nmodel: {}\ncheckpointer: {}\ndataset: {}\nbatch_size: 4\nloss: {}\n"
            "epochs: 1\noptimizer: {}\ndevice: cuda\n",
            "most of its keys are of none of axolotl, .*: tokenizer, model, checkpointer, ",
        ),
        ("[1, 2]\n", "has no keys"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_what_cannot_be_converted_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path, text)


def test_the_command_writes_a_new_file_or_json(tmp_path: Path) -> None:
    source = HERE / "configs/axolotl/llama3-lora.yml"

    def command(*arguments: object, status: int = 0, **options: Any) -> Any:
        done = subprocess.run([PROGRAM, "convert", *map(str, arguments)], capture_output=True, text=True, **options)
        assert done.returncode == status, done.stderr
        return done

    out = tmp_path / "run.yaml"
    lost = tmp_path / source.name
    lost.write_text(source.read_text() + "\nloraplus_lr_embedding: 16\n")
    assert "no counterpart: loraplus_lr_embedding: 16" in command(lost, "--output", out).stderr
    text = out.read_text()
    assert "# Converted from axolotl: llama3-lora.yml" in text and "#   loraplus_lr_embedding: 16" in text
    assert yaml.safe_load(text) == convert(source).config
    assert "Give a new file" in command(source, "--output", out, status=2).stderr
    full = tmp_path / "full.yaml"  # on a disk without room
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (10, 10))
    assert "Make room" in command(source, "--output", full, status=2, preexec_fn=limit).stderr and not full.exists()
    shown = json.loads(command(lost, "--json").stdout)
    assert shown["config"]["lora_rank"] == 16 and shown["missing"][0].keys() == {"key", "note"}
    dated = tmp_path / "dated.yml"  # a date of YAML is none of JSON
    dated.write_text("base_model: m\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\noutput_dir: 2026-01-01\n")
    assert json.loads(command(dated, "--json").stdout)["config"]["output_dir"] == "2026-01-01"


@pytest.mark.parametrize(
    "name",
    [
        "axolotl/llama3-lora.yml",
        pytest.param("trl/script.py", marks=pytest.mark.slow),
        pytest.param("unsloth/dpo.py", marks=pytest.mark.slow),
    ],
)
def test_a_converted_config_trains(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(convert(HERE / "configs" / name).config))
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A friend."}]
    pair = {"prompt": "Who?", "chosen": "A friend.", "rejected": "A foe."}
    row = {"instruction": "Add.", "input": "1", "output": "2"} if "axolotl" in name else {"messages": messages}
    row = pair if "dpo" in name else row
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    smaller = [
        "sequence_len=128",
        "max_steps=2",
        "per_device_train_batch_size=1",
        "warmup_steps=0",
    ]
    smaller += [f"output_dir={tmp_path / 'out'}", "verify_outputs=false", "model_dtype=fp32", "datasets.0.split=train"]
    smaller += ["datasets.0.max_tokens=64", "datasets.0.max_prompt_tokens=32"] if "dpo" in name else []
    loaded = run.load(tmp_path / "run.yaml", [f"model={model}", f"datasets.0.path={tmp_path / 'rows.jsonl'}", *smaller])
    result = run.train(loaded, lambda line: None)
    assert result.steps == 2 and result.loss is not None
    assert (tmp_path / "out/adapter/adapter_model.safetensors").exists()


def test_the_page_of_the_tables_is_generated() -> None:
    spec = importlib.util.spec_from_file_location("coming_from", ROOT / "docs/coming_from.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (ROOT / "docs/coming-from.md").read_text() == generator.page(), (
        "run `python docs/coming_from.py > docs/coming-from.md`"
    )


AXOLOTL = "base_model: m\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nval_set_size: 0.1\n"
TRL = "model_name_or_path: m\ndataset_name: d\n"
CADENCES = ("eval_strategy", "eval_steps", "evals_per_epoch", "save_strategy", "save_steps", "saves_per_epoch")
BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AXOLOTL, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
        (AXOLOTL + "evals_per_epoch: 4\nsaves_per_epoch: 1\n", {"evals_per_epoch": 4, "saves_per_epoch": 1}),
        (AXOLOTL + "eval_steps: 0.05\nsave_steps: 10\n", {"eval_steps": 0.05, "save_steps": 10}),
        (AXOLOTL + "eval_strategy: epoch\nsave_strategy: 'no'\n", {"eval_strategy": "epoch", "save_strategy": "no"}),
        (TRL, {"save_steps": 500}),
        (TRL + "eval_strategy: epoch\nsave_strategy: best\n", {"eval_strategy": "epoch", "save_strategy": "best"}),
        (TRL + "eval_strategy: epoch\neval_steps: 100\nsave_strategy: epoch\nsave_steps: 100\n",
         {"eval_strategy": "epoch", "save_strategy": "epoch"}),
    ],
)  # fmt: skip
def test_evaluations_and_saves_come_as_often(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    config = converted(tmp_path, text).config
    assert {key: config[key] for key in CADENCES if key in config} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AXOLOTL + "early_stopping_patience: 3\n", {"early_stopping_patience": 3}),
        (TRL + "load_best_model_at_end: true\nmetric_for_best_model: eval_loss\ngreater_is_better: false\n",
         {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}),
        (TRL + "greater_is_better: false\n", {}),
        (TRL + "load_best_model_at_end: true\nmetric_for_best_model: eval_rewards/accuracies\n",
         {"load_best_model_at_end": True, "metric_for_best_model": "rewards/accuracies"}),
    ],
)  # fmt: skip
def test_the_best_checkpoint_and_patience_are_keys_here(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    done = converted(tmp_path, text)
    assert {key: done.config[key] for key in BEST if key in done.config} == expected
    assert not {key for key, _ in done.missing} & {*BEST}


def test_a_metric_that_is_not_measured_here_is_named(tmp_path: Path) -> None:
    missing = dict(converted(tmp_path, TRL + "metric_for_best_model: eval_bleu\n").missing)
    assert "evaluations measure the loss" in missing["metric_for_best_model"]


def test_epochs_may_be_a_part(tmp_path: Path) -> None:
    assert converted(tmp_path, TRL + "num_train_epochs: 0.5\n").config["num_epochs"] == 0.5
    whole = converted(tmp_path, TRL + "num_train_epochs: 2.0\n").config["num_epochs"]
    assert whole == 2 and isinstance(whole, int)
