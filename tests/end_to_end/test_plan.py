"""`surogate plan`: published models from config.json alone, the JSON contract, and the plan against allocations."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import oss_mixture
import pytest
import yaml
from end_to_end.product import assert_refused, environment, invoke, write_model

from surogate import run
from surogate.cli.plan_text import plan_text
from surogate.runs.plan_json import to_json
from surogate_core.machine.devices import COLLECTIVE_BYTES, GATHER_BYTES
from surogate_core.machine.devices import device as known_device
from surogate_core.plugins.registry import REFERENCE, Resolved

if TYPE_CHECKING:
    from pathlib import Path

    from end_to_end.product import Workplace

    from surogate_core.planning.plan import Plan

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
SIZES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
PARAMETERS = {"0.6B": 596_049_920, "8B": 8_190_735_360, "32B": 32_762_123_264}
"""Published counts. The embedding of the 0.6B model is tied."""

PARTS = ["weights", "gradients", "optimizer", "activations", "workspace", "runtime"]


@pytest.fixture
def run_of(tmp_path: Path) -> Any:
    def write(size: str, **changes: Any) -> Path:
        model = tmp_path / size
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3 | SIZES[size] | changes))
        config = tmp_path / f"{size}.yaml"
        keys = {"sequence_len": 4096, "per_device_train_batch_size": 1, "optimizer": "adamw"}
        config.write_text(yaml.safe_dump({"model": str(model), **keys}))
        return config

    return write


def surogate_plan(root: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `surogate plan` in a process that cannot import torch, transformers or numpy."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = sys.modules['numpy'] = None\n"
        "from surogate.cli.app import main\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "plan", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(root),
        cwd=root,
    )


@pytest.mark.parametrize("size", list(SIZES))
def test_a_published_model_is_planned_from_its_config_without_torch(size: str, run_of: Any, tmp_path: Path) -> None:
    done = surogate_plan(tmp_path, run_of(size), "--device", "h200", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    keys = [
        "fits",
        "defaults",
        "weight_format",
        "device",
        "device_bytes",
        "host_bytes",
        "host_limit",
        "recompute",
        "row_tiles",
        "decoded_experts",
        "step",
        "kinds",
        "phases",
        "memory",
        "disk",
        "kernels",
        "other_kernels",
        "refusals",
        "notices",
    ]
    assert list(plan) == keys
    assert list(plan["device_bytes"]) == ["total", *PARTS]
    parts = ["collective", "waiting", "copy", "product", "attention", "memory"]
    first = ["seconds", "tokens", "tokens_per_second", "counted_as_compiled", "flops", "model_flops", "bytes"]
    assert list(plan["step"]) == [*first, *(f"{part}_seconds" for part in parts), "link", "scaling"]
    assert plan["device_bytes"]["total"] == sum(plan["device_bytes"][part] for part in PARTS)
    assert plan["host_bytes"]["total"] == sum(value for key, value in plan["host_bytes"].items() if key != "total")
    assert plan["fits"] == (plan["device_bytes"]["total"] <= plan["device"]["bytes"])
    assert {"linear", "attention", "adamw"} <= set(plan["kernels"])
    _assert_sizes(plan, size)


def _assert_sizes(plan: dict[str, Any], size: str) -> None:
    """bf16 weights are their own masters; gradients and two moments are fp32: 14 bytes per parameter plus padding."""
    n, measured = PARAMETERS[size], plan["device_bytes"]
    n_values = 11 * SIZES[size]["num_hidden_layers"] + 3
    for part, bytes_a_parameter in (("weights", 2), ("gradients", 4), ("optimizer", 8)):
        assert bytes_a_parameter * n <= measured[part] <= bytes_a_parameter * n + 2 * 256 * n_values, part
    assert plan["step"]["tokens"] == 4 * 4096
    assert plan["step"]["tokens_per_second"] == pytest.approx(plan["step"]["tokens"] / plan["step"]["seconds"])
    embedding = 0 if SIZES[size]["tie_word_embeddings"] else 151936 * SIZES[size]["hidden_size"]
    products = 6 * (n - embedding) * plan["step"]["tokens"]
    assert products < plan["step"]["flops"] < 1.6 * products, "and attention, and recomputed logits"


def test_a_plan_includes_the_cost_of_determinism_and_names_ops_that_may_lack_it(run_of: Any, tmp_path: Path) -> None:
    config = run_of("0.6B")

    def planned(*overrides: str) -> Plan:
        return run.plan(run.load(config, list(overrides)), "h200")

    (packed,) = planned().kernels.notices
    assert packed.startswith("deterministic: auto: with cuDNN before 9.25.0 gradients may differ")
    (refused,) = planned("deterministic=true").kernels.notices
    assert refused.startswith("deterministic: true: with cuDNN before 9.25.0 the run is refused")
    short = ("sample_packing=false", "sequence_len=2048", "per_device_train_batch_size=2", "recompute_block=true")
    assert planned(*short).kernels.notices == planned("deterministic=false").kernels.notices == ()
    # Score gradients of 4 documents, 16 heads and 2,048 x 2,048 tokens are 512 MiB, dq in fp32 is 64.
    paid = [
        planned(*short, f"deterministic={word}").assembly.memory.arenas["micro_first"] for word in ("true", "false")
    ]
    assert paid[0].arena_bytes > paid[1].arena_bytes
    assert len(packed) < 160, "most runs do not ask for it"
    done = surogate_plan(tmp_path, config, "--device", "h200")
    assert " ".join(done.stdout.split()).count(packed) == 1


def test_the_text_has_the_published_size_and_fits_80_columns(run_of: Any, tmp_path: Path) -> None:
    done = surogate_plan(tmp_path, run_of("8B"), "--device", "h200")
    assert "8.19B parameters" in done.stdout
    assert run.plan(run.load(tmp_path / "8B.yaml"), "h200").assembly.n_params == 8_190_735_360
    long = [line for line in done.stdout.splitlines() if len(line) > 80 and str(tmp_path) not in line]
    assert not long
    assert ".workspace" not in done.stdout and "defaults of surogate train" in done.stdout


def test_the_text_shows_the_share_of_evaluations_unless_it_is_a_trifle(run_of: Any) -> None:
    config = run_of("0.6B")

    def shown(*overrides: str) -> list[str]:
        loaded = run.load(config, list(overrides))
        opened = run.open_run(loaded)
        return [line for line in plan_text(opened, run.plan(opened, "h200"), "", "") if line.startswith("eval:")]

    planned = run.plan(run.load(config), "h200")
    once = planned.eval_seconds(512)
    share = once / (once + 100 * planned.report.step.seconds)
    assert shown() == [f"eval:   up to 512 rows (eval_samples) take {once:.2f} s, up to {share:.0%} of the run"]
    # 150 steps are evaluated twice: after step 100 and at the end
    assert f"up to {2 * once / (2 * once + 150 * planned.report.step.seconds):.0%} of" in shown("max_steps=150")[0]
    for none in ("eval_steps=0", "eval_samples=0", "validation_split_ratio=0", "eval_samples=8"):
        assert shown(none) == [], none


@pytest.mark.parametrize("changes", [{}, {"model_dtype": "bf16", "master_dtype": "fp32"}, {"recompute_block": True}])
def test_the_plan_equals_what_a_run_allocates_to_the_byte(here: Workplace, changes: dict[str, Any]) -> None:
    from surogate_core.runtime.worker import Worker

    prepared = run.plan(run.load(here.write(**changes)), "cpu")
    parts = prepared.report.device_bytes
    inputs = parts["runtime"] - prepared.report.device.runtime_bytes
    worker = Worker.on_cpu(prepared.assembly, prepared.inputs.ops, seed=0)
    assert inputs > 0
    assert worker.buffers.nbytes == sum(parts[part] for part in PARTS[:-1]) + inputs


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_planned_with_suggestions_and_not_trained(here: Workplace) -> None:
    config = here.write(per_device_train_batch_size=2_000_000)
    planned = invoke("plan", config, "--json")
    assert planned.returncode == 0 and json.loads(planned.stdout)["fits"] is False
    text = invoke("plan", config).stdout
    suggestions = text.partition("cheapest ways to make room\n")[2].splitlines()
    changes = [line.strip() for line in suggestions if line.startswith("  ") and line[2:3].strip()]
    assert any("per_device_train_batch_size: " in change for change in changes), text
    refused = invoke("train", config)
    assert_refused(refused, "GiB", *(change for change in changes if ": " in change))
    assert not here.out.exists()


def test_a_batch_size_that_is_a_large_prime_is_planned_quickly(workplace: Workplace) -> None:
    """A search that takes as many steps as the number would not end before the time limit of the process."""
    done = workplace.surogate("plan", workplace.write(per_device_train_batch_size=2**31 - 1))
    assert done.returncode == 0 and "does not fit" in done.stdout
    assert "Nothing makes it fit: " in done.stdout


def test_the_listing_shows_every_program(here: Workplace) -> None:
    done = invoke("plan", here.write(), "--listing")
    assert done.returncode == 0
    for word in (
        "micro_first",
        "micro_next",
        "evaluate",
        "update",
        "start",
        "derive",
        "differentiate",
        "qk_norm_rope",
        "adamw",
    ):
        assert word in done.stdout


def test_a_plan_for_several_gpus_includes_their_communication(here: Workplace) -> None:
    """Two ranks send each gradient once: half of it to reduce, half to gather."""
    one, two = (
        json.loads(invoke("plan", here.write(gpus=gpus), "--device", "h200", "--json").stdout) for gpus in (1, 2)
    )
    assert (one["device"]["count"], two["device"]["count"]) == (1, 2)
    assert two["step"]["tokens"] == 2 * one["step"]["tokens"]
    assert 0.98 < two["step"]["flops"] / one["step"]["flops"] < 1, "on each, but for the update of the other's part"
    assert one["step"]["collective_seconds"] == 0 < two["step"]["waiting_seconds"]
    assert two["device_bytes"]["runtime"] - one["device_bytes"]["runtime"] == COLLECTIVE_BYTES + GATHER_BYTES
    assert two["kernels"]["all_reduce"] == "surogate-core" and "all_reduce" not in one["kernels"]
    text = invoke("plan", here.write(gpus=2), "--device", "h200", "--listing").stdout
    assert "2 x NVIDIA H200" in text and "on each of 2 GPUs" in text and "micro_last" in text
    sent = sum(math.prod(shape) for shape in gradients(here)) * 4 / 1e9
    assert f"each sends {sent:,.2f} GB of gradients" in text
    assert not [line for line in text.partition("recipe ")[2].splitlines() if "gpus:" in line and len(line) > 80]


def test_a_run_on_many_machines_is_planned_without_torch(here: Workplace) -> None:
    where = ("--device", "h100", "--gpus", "16", "--nodes", "8")
    done = surogate_plan(here.root, here.write(), *where, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["device"]["count"], plan["device"]["machines"], plan["device"]["ranks_per_device"]) == (16, 8, 1)
    assert "400 Gb/s" in plan["step"]["link"]["name"] and "not measured" in plan["step"]["link"]["source"]
    text = invoke("plan", here.write(), *where).stdout
    assert "16 x NVIDIA H100 80GB HBM3 on 8 machines" in text and "on each of 16 GPUs" in text
    assert f"scale:  {plan['step']['scaling']:.1%} of 16 x one GPU" in text
    assert "over a network of 400 Gb/s a GPU (published, not measured)," in " ".join(text.split())
    assert not [line for line in text.partition("recipe ")[2].splitlines() if len(line) > 80]
    fit = json.loads(invoke("plan", here.write(), *where, "--fit", "auto", "--json").stdout)
    assert fit["device"]["count"] == 16 and fit["proposals"]


def test_gpus_that_cannot_be_spread_evenly_are_refused(here: Workplace) -> None:
    done = invoke("plan", here.write(), "--device", "h100", "--gpus", "10", "--nodes", "4")
    assert_refused(done, "10 GPUs cannot be spread evenly over 4 machines", "--gpus 12", "--nodes 2")


def gradients(here: Workplace) -> list[tuple[int, ...]]:
    return [v.shape for v in run.plan(run.load(here.write())).assembly.trainable]


def test_several_cpus_cannot_be_planned(here: Workplace) -> None:
    assert_refused(invoke("plan", here.write(gpus=2)), "gpus: 2", "--device h200")


def test_plan_sft_uses_the_defaults_of_sft(here: Workplace) -> None:
    config = here.write(from_scratch=False)
    plain, sft, pt = (
        json.loads(invoke("plan", config, "--json", *option).stdout) for option in ((), ("--sft",), ("--pt",))
    )
    assert [plan["defaults"] for plan in (plain, sft, pt)] == ["train", "sft", "pt"]
    assert pt["device_bytes"] == plain["device_bytes"]
    assert sft["device_bytes"] == run.plan(run.load(config, mode="sft"), "cpu").report.device_bytes
    assert sft["device_bytes"]["weights"] > plain["device_bytes"]["weights"]
    assert "adapter lora" in invoke("plan", config, "--sft").stdout
    assert "--sft for those of surogate sft: LoRA" in invoke("plan", config).stdout
    assert "defaults of" not in invoke("plan", here.write(from_scratch=False, lora=True)).stdout


@pytest.mark.parametrize(("keys", "name"), [([], None), (["qlora_bnb=true"], "nf4"), (["qlora_fp4=true"], "fp4")])
def test_the_plan_names_the_format_of_the_frozen_weights(keys: list[str], name: str | None, run_of: Any) -> None:
    opened = run.open_run(run.load(run_of("0.6B"), [*keys, "optimizer=adamw"], "sft"))
    plan = run.plan(opened, "h200")
    lines = [line for line in plan_text(opened, plan, "", "") if line.startswith("frozen weights")]
    assert lines == [f"frozen weights of blocks in {name} ({key.partition('=')[0]})" for key in keys]
    assert to_json(plan, "sft", "")["weight_format"] == name


@pytest.mark.parametrize("verb", ["plan", "tokenize", "verify"])
def test_only_the_defaults_of_one_verb_can_be_chosen(here: Workplace, verb: str) -> None:
    assert_refused(invoke(verb, here.write(), "--sft", "--pt"), "--sft and --pt", "Give one")


@pytest.mark.parametrize("verb", ["tokenize", "verify"])
def test_other_verbs_accept_sft_too(here: Workplace, verb: str) -> None:
    """`sft` trains an adapter, which needs a base that can be loaded again."""
    assert_refused(invoke(verb, here.write(from_scratch=True), "--sft"), "lora: ", "from_scratch")


def test_the_plan_gives_the_reasons_of_kernels_that_refuse_as_the_run_does(run_of: Any, capsys: Any) -> None:
    """A device for which no kernel is compiled. The reasons are those that the kernels give."""
    device = replace(known_device("h200"), name="old", title="NVIDIA Old", sm=80)
    opened = run.open_run(run.load(run_of("0.6B")))
    text = "\n".join(plan_text(opened, refuse_everywhere(run.plan(opened, device)), "", ""))
    assert "without a compiled kernel, so this GPU cannot run it" in text and "as if compiled" not in text
    assert "attention, linear: needs a newer card" in text and "rmsnorm: no installed package has a kernel" in text
    allowed = run.open_run(run.load(run_of("8B"), ["kernels=allow_reference"]))
    slow = refuse_everywhere(run.plan(allowed, device))
    text = "\n".join(plan_text(allowed, slow, "", ""))
    assert "without what plain torch adds: attention, linear, rmsnorm count as if compiled" in " ".join(text.split())
    assert to_json(slow, "train", "")["step"]["counted_as_compiled"] == ["attention", "linear", "rmsnorm"]
    assert to_json(run.plan(allowed, device), "train", "")["step"]["counted_as_compiled"] == []
    assert "run in plain torch, slowly (kernels: allow_reference)" in text and "cannot run" not in text
    assert "needs a newer card" in text


def refuse_everywhere(plan: Plan) -> Plan:
    why = {"attention": ("needs a newer card",), "linear": ("needs a newer card", "needs a newer card"), "rmsnorm": ()}
    table = plan.kernels
    refused = {
        signature: (op, Resolved(None, REFERENCE, why[op.kind]))
        for signature, (op, _) in table.by_signature.items()
        if op.kind in why
    }
    kernels = replace(table, by_signature={**table.by_signature, **refused})
    return replace(plan, assembly=replace(plan.assembly, kernels=kernels))


def test_check_exits_with_1_if_the_run_does_not_fit(run_of: Any) -> None:
    config = run_of("0.6B", num_hidden_layers=2)
    codes = [invoke("plan", config, "--device", name, "--check").returncode for name in ("h100", "rtx3090")]
    full = invoke("plan", config, "--device", "rtx3090", "--set", "device_memory_limit=1GiB")
    limited = invoke("plan", config, "--device", "rtx3090", "--set", "device_memory_limit=1GiB", "--check")
    assert (codes, full.returncode, limited.returncode) == ([0, 0], 0, 1)


def test_kernels_of_ops_and_keys_of_plugins_that_the_run_does_not_have_are_notices(run_of: Any) -> None:
    choice = "kernels={lora_wgrad: surogate-lora, swiglu: surogate-recipe-bf16}"
    done = invoke("plan", run_of("0.6B"), "--device", "h100", "--set", choice, "--set", "lora_rank=4")
    assert done.returncode == 0 and done.stdout.count("has no effect, because this run has no such op") == 1
    assert "kernels: lora_wgrad: has no effect" in done.stdout and "\nlora_rank: has no effect" in done.stdout


@pytest.mark.parametrize(
    ("recipe", "first", "last", "line"),
    [
        ("fp8-hybrid", 1, 0, "products of block 0 in bf16"),
        ("nvfp4", 0, 1, "products of block 1 in bf16"),
        ("fp8-hybrid", 0, 0, ""),
        ("bf16", None, None, ""),
    ],
)
def test_the_blocks_that_a_recipe_leaves_alone_are_listed(
    recipe: str, first: int | None, last: int | None, line: str, here: Workplace
) -> None:
    keys = {} if first is None else {"skip_quant_first_layers": first, "skip_quant_last_layers": last}
    text = invoke("plan", here.write(recipe=recipe, model_dtype="bf16", **keys)).stdout
    assert line in text.splitlines() if line else "products of block" not in text


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"lora": True},
        {"lora": True, "qlora_fp8": True},
        {"skip_quant_first_layers": 1},
        {"skip_quant_first_layers": 1, "ranks_per_gpu": 2, "zero_level": 3},
    ],
    ids=str,
)
def test_a_matrix_whose_sizes_the_recipe_does_not_take_is_named(keys: dict[str, object], here: Workplace) -> None:
    write_model(here.root / "model", intermediate_size=72)
    config = here.write(recipe="fp8-hybrid", model_dtype="bf16", from_scratch="lora" not in keys, **keys)
    lines = invoke("plan", config).stdout.splitlines()
    assert "down_proj in bf16, which fp8-hybrid does not quantize" in lines
    assert ("products of block 0 in bf16" in lines) == ("skip_quant_first_layers" in keys)


def test_experts_with_biases_are_quantized_so_no_line_names_them(here: Workplace) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
    own = {"architectures": ["OssMixtureForCausalLM"], "model_type": "oss_mixture"}
    write_model(here.root / "model", **sizes, **own)
    config = here.write(recipe="fp8-hybrid", model_dtype="bf16", plugins=[oss_mixture.__file__])
    text = invoke("plan", config, "--device", "h200").stdout
    assert "fp8_grouped_linear" in text and "does not quantize" not in text


def test_what_a_frozen_reference_computes_is_not_listed(here: Workplace) -> None:
    """Its copy of the weights stays in bf16, as it was."""
    config = here.write(recipe="fp8-hybrid", model_dtype="bf16", loss="dpo", reference="frozen")
    for first, line in ((1, "products of block 0 in bf16"), (0, "")):
        text = invoke("plan", config, "--set", f"skip_quant_first_layers={first}").stdout
        assert [found for found in text.splitlines() if "in bf16" in found] == ([line] if line else []), text


def test_the_blocks_of_a_large_model_are_listed_by_ranges(run_of: Any, tmp_path: Path) -> None:
    done = surogate_plan(tmp_path, run_of("8B"), "--device", "h200", "--set", "recipe=nvfp4")
    assert "products of blocks 0, 32 to 35 in bf16" in done.stdout.splitlines()
