"""Settings that fit a device: each proposal, written into the config, takes exactly what it says."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from surogate import run
from surogate.cli.fit import figures, fitted
from surogate.cli.options import RunArguments
from surogate.cli.plan import Machines, fit_command
from surogate.cli.plan_text import nothing_fits, plan_text
from surogate.fitting.changes import Proposal, batch_axis, gives_up_less, resorts, shorter_rows
from surogate.fitting.proposals import faster_settings, propose, suggest
from surogate.runs.run import Run
from surogate.training import start as training
from surogate_core.api import DeviceInfo
from surogate_core.assembly.assemble import sketch
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import cpu
from surogate_core.machine.devices import device as known_device
from surogate_core.machine.local_device import LocalDevice
from surogate_core.planning import plan as plan_module
from surogate_core.planning.plan import Plan

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 512},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "wide": {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "intermediate_size": 12288},
    "70b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
}
Planned = tuple[Run, Plan]
Make = Callable[..., Planned]


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Collections take half of the time of plans (`cli.plan`)."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def plan(tmp_path: Path) -> Make:
    """Return a function that plans a run: (size, device, key=value ...) -> run and plan."""

    def planned(size: str, device: str | DeviceInfo, *overrides: str, **keys: Any) -> Planned:
        model = tmp_path / size
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(BASE | SIZES[size]))
        config = tmp_path / f"{size}.yaml"
        config.write_text(json.dumps({"model": str(model), "optimizer": "adamw", "sequence_len": 1024} | keys))
        opened = run.open_run(run.load(config, list(overrides)))
        return opened, run.plan(opened, device)

    return planned


def check_exact(plan: Make, size: str, device: str, proposals: list[Proposal], before: Plan, **keys: Any) -> None:
    for proposal in proposals:
        _, after = plan(size, device, *(f"{key}={value}" for key, value in proposal.changes.items()), **keys)
        assert after.report.device_bytes == proposal.plan.report.device_bytes, proposal.lines
        assert after.report.host_bytes == proposal.plan.report.host_bytes, proposal.lines
        assert after.report.step.seconds == pytest.approx(proposal.plan.report.step.seconds), proposal.lines
        assert after.report.tokens == before.report.tokens, "the tokens of a step are the user's"


def speeds(proposals: list[Proposal]) -> list[float]:
    return [proposal.plan.report.tokens_per_second for proposal in proposals]


def test_proposals_keep_the_step_and_are_sorted_by_speed(plan: Make) -> None:
    keys = {"sequence_len": 4096, "recompute": False, "device_memory_limit": "31GiB"}
    opened, before = plan("wide", "h200", **keys)
    every = propose(opened, before)
    proposals = [proposal for proposal in every if not proposal.resort]
    assert not before.report.fits and len(proposals) >= 2 and all(p.fits for p in every)
    assert every[: len(proposals)] == proposals, "last resorts come last"
    fastest = max(speeds(proposals))
    assert speeds(proposals)[0] >= 0.995 * fastest and speeds(proposals)[-1] <= 1.005 * speeds(proposals)[0]
    for inputs in (p.plan.inputs for p in proposals):
        assert inputs.batch_size * inputs.grad_accum_steps == 8 and inputs.seq_len == 4096
        assert inputs.precision == before.inputs.precision and not inputs.adapters
    check_exact(plan, "wide", "h200", proposals, before, **keys)


def test_a_larger_micro_batch_is_proposed_where_it_is_faster(plan: Make) -> None:
    keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    opened, before = plan("tiny", "h200", **keys)
    first = propose(opened, before)[0]
    assert first.changes == {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    assert first.costs(before) < -0.1


def test_a_run_that_is_the_fastest_is_not_changed(plan: Make) -> None:
    opened, before = plan("tiny", "h200", per_device_train_batch_size=16, gradient_accumulation_steps=1)
    assert propose(opened, before)[0].changes == {}


def test_forced_recomputation_is_dropped_where_the_memory_suffices(plan: Make) -> None:
    opened, before = plan("tiny", "h200", recompute_block=True, gradient_accumulation_steps=1)
    assert propose(opened, before)[0].changes == {"recompute_block": False}


def test_a_strategy_is_proposed_by_the_options_of_its_definition(plan: Make) -> None:
    keys = {"sequence_len": 4096, "lora": True, "device_memory_limit": "10GiB"}
    opened, before = plan("wide", "h200", **keys)
    first = propose(opened, before)[0]
    assert first.changes["offload_residual"] is True and first.costs(before) < -0.01
    assert first.plan.report.pinned_bytes > 0
    check_exact(plan, "wide", "h200", [first], before, **keys)
    little = propose(*plan("wide", "h200", host_memory_limit="1MiB", **keys))
    assert not any("offload_residual" in p.changes for p in little), "the host has no room"


def test_offloading_is_turned_off_where_the_host_has_no_room(plan: Make) -> None:
    opened, before = plan("wide", "h200", offload_residual=True, host_memory_limit="1MiB")
    assert before.report.missing_bytes <= 0 < before.report.missing_host_bytes
    found = suggest(opened, before)
    assert found[0].fits and found[0].changes["offload_residual"] is False
    with pytest.raises(ConfigError, match=r"offload_residual: false.*; or raise host_memory_limit"):
        training.refuse_unless_it_fits(opened, before)


def test_on_a_cpu_what_the_host_holds_counts_and_no_offloading_is_proposed(plan: Make) -> None:
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "recompute": False}
    held = {"offload_weights": True, "offload_residual": True}
    large = replace(cpu(), memory_bytes=200 << 30)
    report = plan("wide", large, **small, **held)[1].report
    assert report.fits and report.device_bytes["pinned"] == report.pinned_bytes > 0
    assert report.device_bytes["total"] > plan("wide", large, **small)[1].report.device_bytes["total"]
    little = replace(large, memory_bytes=report.device_bytes["total"] - report.pinned_bytes // 2)
    opened, before = plan("wide", little, **small, **held)
    assert not before.report.fits and before.report.missing_bytes == report.pinned_bytes // 2
    assert "counted above" in "\n".join(plan_text(opened, before, "", ""))
    for planned in ((opened, before), plan("wide", little, **small)):
        changes = [proposal.changes for proposal in propose(*planned)]
        assert not any(key.startswith("offload") and value is True for c in changes for key, value in c.items())


def test_a_strategy_that_holds_little_is_turned_off_too(plan: Make) -> None:
    held = {"lora": True, "offload_weights": 1, "host_memory_limit": "1MiB"}
    opened, before = plan("wide", "h200", **held)
    assert suggest(opened, before)[0].changes["offload_weights"] is False
    assert "use a machine with more memory" in nothing_fits(before.report)
    too_large = plan("wide", "h200", device_memory_limit="1GiB", **held)[1].report
    assert "a GPU with more memory" in nothing_fits(too_large)


@pytest.mark.slow
def test_the_fastest_proposal_does_not_depend_on_how_the_file_splits_a_step(plan: Make) -> None:
    """Within 1 % from 32 rows at once: such estimates start from a plan that is far from the proposals."""
    firsts = {}
    for rows in (2, 8, 32):
        keys = {"lora": True, "sequence_len": 2048, "device_memory_limit": "24GiB"}
        opened, before = plan(
            "8b", "h200", per_device_train_batch_size=rows, gradient_accumulation_steps=max(1, 8 // rows), **keys
        )
        firsts[rows] = propose(opened, before)[0]
        assert firsts[rows].plan.inputs.batch_size == 1
    assert firsts[2].changes == firsts[8].changes and firsts[2].changes.get("offload_residual") is True
    assert not any("offload_weights" in key for key in firsts[2].changes)
    speeds = [first.plan.report.tokens_per_second for first in firsts.values()]
    assert min(speeds) > 0.99 * max(speeds), speeds


def test_a_last_resort_gives_something_up(plan: Make) -> None:
    opened, before = plan("wide", "h200", lora=True, sequence_len=4096, device_memory_limit="8GiB")
    suggestions = suggest(opened, before)
    changes = [suggestion.changes for suggestion in suggestions]
    assert suggestions and all(changes.count(change) == 1 for change in changes)


def test_copies_and_collectives_together_have_no_share_of_what_is_not_hidden(plan: Make) -> None:
    for keys, lines in (
        ({"gpus": 2}, 1),
        ({"offload_optimizer": True}, 1),
        ({"gpus": 2, "offload_optimizer": True}, 0),
    ):
        opened, planned = plan("wide", "h200", **keys)
        text = list(plan_text(opened, planned, "", ""))
        assert sum(line.startswith(("host: ", "gpus: ")) and "not hidden" in line for line in text) == lines, text
        assert any(line.startswith("time: ") for line in text)


@pytest.mark.parametrize(("device", "word", "value"), [("h200", "false", "auto"), (cpu(), "false", True)])
def test_recomputation_is_proposed_in_the_word_of_the_device(
    plan: Make, device: str | DeviceInfo, word: str, value: object
) -> None:
    keys = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "recompute": word}
    needed = plan("tiny", device, **keys)[1].report.device_bytes["total"]
    little = replace(plan("tiny", device)[1].target.device, memory_bytes=needed - 1)
    assert propose(*plan("tiny", little, **keys))[0].changes == {"recompute": value}


def test_micro_batches_have_the_rows_of_the_step(plan: Make) -> None:
    opened, _ = plan("tiny", "h200", per_device_train_batch_size=6, gradient_accumulation_steps=2)
    axis = batch_axis(opened.config)
    assert axis.settings[axis.own] == {}
    rows = [changes.get("per_device_train_batch_size", 6) for changes in axis.settings]
    steps = [changes.get("gradient_accumulation_steps", 2) for changes in axis.settings]
    assert rows == [12, 6, 4, 3, 2, 1] and all(r * s == 12 for r, s in zip(rows, steps, strict=True))
    shorter = list(shorter_rows(opened.config))
    assert [changes["sequence_len"] for changes in shorter] == [512, 256]
    assert all(c["sequence_len"] * c["gradient_accumulation_steps"] == 2 * 1024 for c in shorter)


CASES: dict[str, tuple[str, str, dict[str, Any], list[int]]] = {
    "an adapter of 70B": ("70b", "h200", {"lora": True, "sequence_len": 2816}, [0, 0, 0]),
    "an adapter of 70B with long rows": ("70b", "h200", {"lora": True, "sequence_len": 16384}, [0, 0, 0]),
    "all of 32B with states on the host": ("32b", "h200", {"sequence_len": 4096}, [0, 0, 0]),
    "all of 8B with everything on the host": ("8b", "rtx4090", {"sequence_len": 4096}, [0, 0, 0]),
    "an adapter and recomputation": (
        "wide",
        "rtx4090",
        {"sequence_len": 4096, "host_memory_limit": "1MiB", "device_memory_limit": "8GiB"},
        [0, 0],
    ),
    "an odd batch": (
        "wide",
        "h100",
        {"per_device_train_batch_size": 3, "recompute": False, "device_memory_limit": "27GiB"},
        [0, 0, 0],
    ),
}
"""Name -> size, device, keys, and for each suggestion whether the run still does not fit."""


SLOW = ("8b", "32b", "70b")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if size in SLOW else []) for n, (size, *_) in CASES.items()]
)
def test_a_run_that_does_not_fit_has_suggestions(plan: Make, name: str) -> None:
    size, device, keys, missing = CASES[name]
    opened, before = plan(size, device, **keys)
    assert not before.report.fits
    suggestions = suggest(opened, before)
    assert [int(not s.fits) for s in suggestions] == missing
    check_exact(plan, size, device, suggestions, before, **keys)
    assert any("lora" in s.changes for s in suggestions) is not keys.get("lora", False)
    assert all(s.saves(before) > 0 for s in suggestions)
    changed = {"param_grad_dtype", "optimizer_state_dtype", "lora", "sequence_len", "qlora_fp8", "qlora_bnb"}
    assert all(bool(s.resort) is bool(changed & set(s.changes)) for s in suggestions)


def test_few_plans_are_made_for_proposals(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan takes up to three assemblies; a change that cannot be faster takes one."""
    opened, before = plan("wide", "h100", sequence_len=4096, device_memory_limit="27GiB")
    made: list[object] = []
    monkeypatch.setattr(plan_module, "sketch", lambda given, recording: made.append(given) or sketch(given, recording))
    assert len(suggest(opened, before)) == 3
    assert len(made) <= 24


def test_what_is_proposed_is_verified_and_what_it_was_compared_with_is_not(
    plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, before = plan("wide", "h100", sequence_len=4096, device_memory_limit="20GiB")
    made: list[Assembly] = []
    monkeypatch.setattr(plan_module, "sketch", lambda *given: made.append(sketch(*given)) or made[-1])
    proposals = suggest(opened, before)
    shown = [proposal.plan.assembly for proposal in proposals]
    assert proposals and all(assembly.passed.later == [] for assembly in shown)
    assert sum(bool(assembly.passed.later) for assembly in made) > len(shown)


def test_a_run_that_fits_or_cannot_be_changed_has_no_suggestions(plan: Make) -> None:
    assert suggest(*plan("tiny", "h200")) == []
    bare = {"per_device_train_batch_size": 1, "sequence_len": 255, "recompute_block": True}
    bare |= {"offload_residual": True, "offload_weights": True, "host_memory_limit": "3GiB"}
    bare |= {"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16", "lora": True}
    assert suggest(*plan("wide", "rtx3090", device_memory_limit="4GiB", **bare)) == []


def test_a_run_that_does_not_fit_is_refused_with_the_suggestions(plan: Make) -> None:
    opened, planned = plan("wide", "rtx4090", device_memory_limit="20GiB", host_memory_limit="1MiB")
    with pytest.raises(ConfigError) as refused:
        training.refuse_unless_it_fits(opened, planned)
    text = str(refused.value)
    for suggestion in suggest(opened, planned):
        assert ", ".join(suggestion.lines) in text
    assert "lora: true" in text and "still missing" not in text, "what does not fit is not suggested next to what does"


def test_a_dtype_of_moments_that_the_optimizer_refuses_is_not_proposed(plan: Make) -> None:
    opened, before = plan("wide", "h100", optimizer="adamw_8bit")
    keys = {key for changes in resorts(opened, before, before) for key in changes}
    assert "param_grad_dtype" in keys and "optimizer_state_dtype" not in keys


def test_micro_batches_that_the_recipe_refuses_are_not_proposed(plan: Make) -> None:
    """Products in FP8 take a multiple of 16 tokens: two rows of 2,056, but not one."""
    opened, planned = plan("wide", "l40s", recipe="fp8-hybrid", sequence_len=2056, device_memory_limit="20GiB")
    suggestions = suggest(opened, planned)
    assert suggestions and not any(s.plan.inputs.batch_size == 1 for s in suggestions)


# ---------------------------------------------------------------------------------------------------- the command line


def test_fit_takes_a_device_a_size_or_auto(plan: Make) -> None:
    opened, _ = plan("tiny", "h200")
    limited = run.fit(opened.loaded, "24GiB", "h200")
    assert limited.before.report.device.memory_bytes == 24 << 30
    assert limited.proposals[0].changes["device_memory_limit"] == "24GiB"
    assert run.fit(opened.loaded, "h100").before.report.device.name == "h100"
    assert run.fit(opened.loaded, "auto", "h100").before.report.device.name == "h100"
    with pytest.raises(ConfigError, match="--fit h100 and --device h200: each names another device"):
        run.fit(opened.loaded, "h100", "h200")
    assert run.fit(opened.loaded, "4090").before.report.device.name == "rtx4090", "no size of 4,090 bytes"
    assert run.fit(opened.loaded, "h100", "H100").before.report.device.name == "h100", "both name the same one"
    assert run.fit(opened.loaded, "AUTO", "h100").before.report.device.name == "h100"
    with pytest.raises(
        ConfigError, match="--fit abc: is neither a size such as 24GiB nor auto; device: 'abc' is not in"
    ):
        run.fit(opened.loaded, "abc")
    with pytest.raises(ConfigError, match="not in the device table"):
        run.fit(opened.loaded, "abc", "h200")


@pytest.mark.parametrize("target", ["0", "0GiB", "-3GiB", "", " ", "24Gib of it", "1e999"])
def test_fit_refuses_what_is_no_size(plan: Make, target: str) -> None:
    opened, _ = plan("tiny", "h200")
    for device in (None, "h200"):
        with pytest.raises(ConfigError) as refused:
            run.fit(opened.loaded, target, device)
        assert str(refused.value).startswith(f"--fit {target!r}: must be a size ")
        assert str(refused.value).endswith("; or name a device, such as h200, or auto.")


def test_plan_fit_prints_a_table_and_json(plan: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan("tiny", "h200", gradient_accumulation_steps=2)
    arguments = RunArguments(tmp_path / "tiny.yaml", [])
    assert fit_command(arguments, "h200", Machines(), as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1 *") and line.endswith("per_device_train_batch_size: 4") for line in lines)
    assert max(map(len, lines)) <= 80
    assert fit_command(arguments, "h200", Machines(), as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["proposals"][0]["changes"] == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    assert data["proposals"][0]["tokens_per_second"] > data["step"]["tokens_per_second"]


def test_fit_says_that_nothing_needs_changing(plan: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    plan("tiny", "h200", **keys)
    arguments = RunArguments(tmp_path / "tiny.yaml", [])
    for target, expected in (("h200", "nothing needs changing:"), ("24GiB", "nothing needs changing but the limit:")):
        assert fit_command(arguments, target, Machines("h200"), as_json=False) == 0
        assert expected in capsys.readouterr().out
    plan("tiny", "h200", device_memory_limit="24GiB", **keys)
    assert fit_command(arguments, "24GiB", Machines("h200"), as_json=False) == 0
    assert "nothing needs changing:" in capsys.readouterr().out


def test_recomputation_that_makes_a_step_shorter_has_one_sign(plan: Make) -> None:
    _, planned = plan("wide", "h200", lora=True, sequence_len=4096, device_memory_limit="9GiB")
    assert planned.chosen is not None
    faster = replace(planned, chosen=replace(planned.chosen, costs=-0.007 * planned.chosen.step))
    assert figures(faster)[-1] == "-0.7%" and figures(planned)[-1].startswith("+")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "resort"),
    [("32b", "a base of 4 bits"), ("70b", "a base of 4 bits, also of embedding and LM head")],
)
def test_an_adapter_on_a_4_bit_base_is_proposed_for_a_card_of_8_gib(plan: Make, size: str, resort: str) -> None:
    """As a last resort, because it rounds the base."""
    opened, before = plan(size, "h200", lora=True, sequence_len=2048, device_memory_limit="8GiB")
    assert not before.report.fits
    found = [p for p in suggest(opened, before) if p.changes.get("qlora_bnb")]
    assert found and found[0].fits and "lora" not in found[0].changes and found[0].resort == resort


def test_a_run_that_does_not_fit_is_proposed_a_4_bit_base(plan: Make) -> None:
    keys = {"sequence_len": 2048, "device_memory_limit": "5GiB", "host_memory_limit": "1MiB"}
    *_, last = suggest(*plan("wide", "h200", **keys))
    assert last.fits and last.changes["lora"] is True and last.changes["qlora_bnb"] is True
    assert last.resort.startswith("an adapter in place of all weights, a base of 4 bits")
    *_, last = suggest(*plan("wide", "h200", lora=True, **keys))
    assert last.fits and last.changes["qlora_bnb"] is True and "lora" not in last.changes


def test_weight_formats_are_tried_from_the_most_bits_on(plan: Make) -> None:
    """Of those of about as many bits, the smallest."""
    opened, before = plan("wide", "h200", device_memory_limit="8GiB")
    *_, first, last = resorts(opened, before, before)
    assert (first, last) == ({"lora": True, "qlora_fp8": True}, {"lora": True, "qlora_bnb": True})
    opened, before = plan("wide", "h200", device_memory_limit="4GiB", lora=True, qlora_fp4=True)
    assert not any("qlora" in key for changes in resorts(opened, before, before) for key in changes)


def test_where_a_base_of_more_bits_fits_easily_none_of_fewer_is_proposed(plan: Make) -> None:
    keys: dict[str, Any] = {"lora": True, "sequence_len": 512, "per_device_train_batch_size": 1}
    keys |= {"gradient_accumulation_steps": 1, "host_memory_limit": "1MiB", "device_memory_limit": "15GiB"}
    (only,) = suggest(*plan("8b", "h200", **keys))
    assert only.resort == "a base of 8 bits" and not only.plan.chosen
    opened, _ = plan("wide", "h200")
    eight, four = {"lora": True, "qlora_fp8": True}, {"lora": True, "qlora_bnb": True}
    assert gives_up_less(opened, eight, four) and gives_up_less(opened, {"lora": True}, eight)
    assert not gives_up_less(opened, eight, {"lora": True})


def test_sums_in_any_order_are_a_last_resort_where_their_order_takes_memory(plan: Make) -> None:
    """It is the first: nothing but last bits changes."""
    keys: dict[str, Any] = {"lora": True, "sequence_len": 4096, "host_memory_limit": "1MiB", "sample_packing": False}
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "recompute": True}
    opened, before = plan("wide", "h100", **keys)
    least = before.report.device_bytes["total"] - (512 << 20)
    opened, before = plan("wide", "h100", **keys | {"device_memory_limit": f"{least}B"})
    assert not before.report.fits
    first, *_ = suggest(opened, before)
    assert first.fits and first.changes["deterministic"] is False
    assert first.resort == "gradients whose last bits may differ from run to run"
    opened, before = plan("wide", "h100", **keys | {"device_memory_limit": f"{least}B", "deterministic": False})
    assert all("deterministic" not in proposal.changes for proposal in suggest(opened, before))


def test_train_fit_applies_the_first_proposal_and_prints_it(
    plan: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _ = plan("tiny", "h200", gradient_accumulation_steps=2)
    monkeypatch.setattr(training, "usable_device", lambda: LocalDevice(known_device("h200"), 1, "made up"))
    applied = fitted(RunArguments(tmp_path / "tiny.yaml", ["max_steps=3"]), opened.loaded, "h200").config
    assert (applied.per_device_train_batch_size, applied.gradient_accumulation_steps, applied.max_steps) == (4, 1, 3)
    assert "  per_device_train_batch_size: 4\n" in capsys.readouterr().out


def test_train_fit_refuses_a_device_that_this_machine_does_not_have(plan: Make, tmp_path: Path) -> None:
    opened, _ = plan("tiny", "h200")
    with pytest.raises(
        ConfigError, match=r"--fit h200: this machine has .*CPU.*, not NVIDIA H200\. Train with --fit auto"
    ):
        fitted(RunArguments(tmp_path / "tiny.yaml", []), opened.loaded, "h200")


def test_train_fit_refuses_last_resorts(plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, _ = plan("wide", "h100", sequence_len=1024, device_memory_limit="26GiB", host_memory_limit="1MiB")
    monkeypatch.setattr(training, "usable_device", lambda: LocalDevice(known_device("h100"), 1, "made up"))
    with pytest.raises(ConfigError, match=r"nothing fits without changing what the run learns. Change .*: bf16"):
        fitted(RunArguments(tmp_path / "wide.yaml", []), opened.loaded, "h100")


def test_where_offloading_is_proposed_a_base_in_few_bits_without_host_memory_is_too(plan: Make) -> None:
    keys = {"sequence_len": 2048, "lora": True, "device_memory_limit": "5.5GiB", "per_device_train_batch_size": 1}
    found = suggest(*plan("wide", "rtx4090", **keys))
    assert found[0].plan.report.pinned_bytes and not found[0].resort
    (stored,) = [proposal for proposal in found if proposal.changes.get("qlora_bnb")]
    assert stored.fits and stored.plan.report.pinned_bytes < 0.75 * found[0].plan.report.pinned_bytes


def test_rows_that_are_too_long_are_made_as_little_shorter_as_fits(plan: Make) -> None:
    """Rows of twice the length do not fit, with anything that the search may offload."""
    keys = {"lora": True, "sequence_len": 32768, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    keys |= {"device_memory_limit": "9GiB", "host_memory_limit": "1MiB", "row_tiles": 0}
    *_, last = suggest(*plan("wide", "h200", **keys))
    length = last.changes["sequence_len"]
    assert last.fits and 256 < length < 32768 and "shorter rows" in last.resort
    longer = suggest(*plan("wide", "h200", **keys | {"sequence_len": 2 * length}))
    assert all(proposal.changes.get("sequence_len", length) <= length for proposal in longer)


def test_a_run_that_needs_less_offloading_than_it_has_is_told_what_is_faster(plan: Make) -> None:
    faster = faster_settings(*plan("wide", "h200", lora=True, offload_weights=True, recompute=True))
    assert faster and faster.fits and faster.changes["offload_weights"] is False
    assert faster_settings(*plan("wide", "h200", lora=True)) is None
    assert faster_settings(*plan("wide", "h200", lora=True, device_memory_limit="2GiB", offload_weights=True)) is None


@pytest.mark.parametrize(
    ("lora", "printed"), [(False, "extend the model by rope_scaling"), (True, "in its config.json")]
)
def test_rows_that_are_longer_than_the_model_are_refused_with_the_lines_of_yarn(
    plan: Make, lora: bool, printed: str
) -> None:
    with pytest.raises(ConfigError, match="Use 40960 or less, or extend") as error:
        plan("tiny", "h200", sequence_len=65536, lora=lora)
    message = str(error.value)
    assert printed in message and "yarn" in message and "40960" in message
    if not lora:
        line = message[message.index("rope_scaling") : message.rindex(".")]
        plan("tiny", "h200", sequence_len=65536, **yaml.safe_load(line))
