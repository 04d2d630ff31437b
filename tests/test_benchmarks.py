"""The harness of benchmarks/: both sides take a step of the same size, and a row is the two of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from surogate_core.api import Op, Value

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "examples/tiny-qwen3")
SIZES = ["--model", TINY, "--seq-len", "32", "--batch", "2", "--accumulate", "2", "--steps", "3", "--seconds", "0.1"]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_our_side_times_steps_with_accumulation(benchmarks: Any) -> None:
    step = benchmarks("step")
    arguments = step.parse([*SIZES, "--set", "model_dtype=bf16"])
    result = step.measure(arguments, 2)
    assert len(result["all_ms"]) == 3
    assert result["tokens_per_second"] == round(2 * 2 * 32 / result["step_ms"] * 1000)
    assert result["loss"] > 0 and result["planned_bytes"] > 0 and result["window"][0] < result["window"][1]


def test_our_side_trains_an_adapter_on_random_weights(benchmarks: Any) -> None:
    step = benchmarks("step")
    result = step.measure(step.parse([*SIZES, "--lora", "--set", "model_dtype=bf16"]), 2)
    assert result["lora"] and result["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layers"), [([], "full"), (["--lora", "--no-peft"], "written out"), (["--lora"], "PEFT")]
)
def test_the_other_side_times_the_same_step(benchmarks: Any, options: list[str], layers: str) -> None:
    if layers == "PEFT":
        pytest.importorskip("peft")
    torch_step = benchmarks("torch_step")
    result = torch_step.measure(torch_step.parse([*SIZES, *options]))
    assert (result["layers"], result["captured"]) == (layers, False)
    assert result["tokens_per_second"] == round(2 * 2 * 32 / result["step_ms"] * 1000)
    assert result["loss"] == pytest.approx(7.6, abs=0.5)  # random weights: about log of the vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--zero-level", "2"], ["--zero-level", "3"], ["--lora", "--no-peft"]], ids=str)
def test_the_other_side_trains_on_several_devices(options: list[str]) -> None:
    words = [sys.executable, str(ROOT / "benchmarks/torch_step.py"), *SIZES, "--gpus", "2", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens_per_second"] == round(2 * 2 * 2 * 32 / result["step_ms"] * 1000)
    assert result["loss"] == pytest.approx(7.6, abs=0.5)


@pytest.mark.slow
def test_the_written_out_adapter_computes_what_pefts_does(benchmarks: Any) -> None:
    peft = pytest.importorskip("peft")
    import torch

    torch_step = benchmarks("torch_step")
    base = torch.nn.Linear(8, 6, bias=False)
    ours = torch_step.LoraLinear(base)
    parent = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False))
    config = peft.LoraConfig(r=torch_step.RANK, lora_alpha=torch_step.ALPHA, target_modules=["0"])
    theirs = peft.get_peft_model(parent, config).base_model.model[0]
    torch.nn.init.normal_(ours.lora_B)
    with torch.no_grad():
        theirs.base_layer.weight.copy_(base.weight)
        theirs.lora_A["default"].weight.copy_(ours.lora_A)
        theirs.lora_B["default"].weight.copy_(ours.lora_B)
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.slow
def test_a_row_is_written_with_both_sides_and_what_failed_is_said(tmp_path: Path) -> None:
    """The whole command. The models' folder holds tiny models under the names that two rows ask for."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "qwen3-0.6b").symlink_to(TINY)
    small = (
        "import sys, compare, rows; rows.ROWS = (rows.Row('lora-tiny', 'qwen3-0.6b', 1, 32, 2, lora=True, floor=1e3),"
        " rows.Row('full-absent', 'absent', 1, 32, 1)); sys.argv[0] = 'compare.py'; compare.main()"
    )
    words = [sys.executable, "-c", small, "--models", str(models), "--timed", "0.1", "--seconds", "900"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "rows.jsonl")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    first, second = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert first["ratio"] == pytest.approx(
        first["ours"]["tokens_per_second"] / first["torch"]["tokens_per_second"], abs=1e-3
    )
    assert first["share_of_floor"] is None  # the floor is that of another device
    assert second["ratio"] is None and "absent" in second["ours"]["error"] and second["torch"]["error"]
    assert "lora-tiny" in done.stdout and "  ours: " in done.stdout


def test_a_side_that_takes_too_long_is_ended(benchmarks: Any) -> None:
    compare = benchmarks("compare")
    result = compare.measure_side([sys.executable, "-c", "import time; time.sleep(600)"], 0.5, None)
    assert result == {"error": "not done after 0 s, what --seconds left"}
    assert "error" in compare.measure_side(["true"], -1.0, None)


def test_ratio_floor_and_plan_follow_from_the_two_sides(benchmarks: Any) -> None:
    compare, rows = benchmarks("compare"), benchmarks("rows")
    row = rows.Row("r", "m", 1, 32, 1, floor=200.0)
    ours = {
        "tokens_per_second": 150,
        "gpu": rows.FLOOR_GPU,
        "planned_ms": 9.0,
        "step_ms": 10.0,
        "planned_bytes": 1 << 30,
    }
    found = compare.summarise(row, {"ours": ours, "torch": {"tokens_per_second": 100, "captured": True}})
    assert (found["ratio"], found["share_of_floor"], found["planned_share"]) == (1.5, 0.75, 0.9)
    assert "1.500" in compare.line(found) and "100g" in compare.line(found)
    assert compare.summarise(row, {"ours": {}, "torch": {"tokens_per_second": 100}})["ratio"] is None
    assert len(compare.HEADINGS) == len(compare.line(found))


def test_samples_are_averaged_over_the_timed_steps_alone(benchmarks: Any) -> None:
    card = benchmarks("card")
    taken = [card.Sample(float(t), 1000.0 + t, 100.0 * t, (10 + t) << 20) for t in range(5)]
    samples = card.Samples(taken)
    assert samples.during(2, 3) == {"clock_mhz": 1002, "watts": 250, "process_bytes": 3 << 20}
    assert samples.during(9, 10) == {"clock_mhz": None, "watts": None, "process_bytes": None}
    with card.sampling(None) as none:
        assert none.during(0, 1)["watts"] is None


def test_rows_are_chosen_by_pattern_and_their_models_exist(benchmarks: Any) -> None:
    rows = benchmarks("rows")
    assert [row.name for row in rows.chosen(["lora-*-8b", "full-llama*"])] == ["lora-qwen3-8b", "full-llama-3.2-1b"]
    assert rows.chosen([]) == [row for row in rows.ROWS if row.gpus == 1]
    with pytest.raises(ValueError, match="no row is named nothing"):
        rows.chosen(["nothing"])
    assert all((rows.MODELS / row.model / "config.json").exists() for row in rows.ROWS)


def test_the_update_of_an_optimizer_is_that_of_a_plan(benchmarks: Any) -> None:
    """Bytes of an element with 8-bit moments and bf16 masters: gradient 2, master 4, codes and scales 4.06."""
    optimizers = benchmarks("optimizers")
    for name, element in (("adamw", 2 + 4 + 8), ("adamw_8bit", 2 + 4 + 4 * (1 + 4 / 256))):
        op = optimizers.update_op(name, ("bf16", "bf16", "bf16"), 1)
        matrices = [v for v in op.ins[4 : 4 + op.attrs["n"]] if len(v.shape) == 2]
        assert optimizers.kernels(name)[0].op == op.kind == name
        if name == "adamw":
            assert optimizers.moved(op) == element * sum(v.size for v in op.ins[4 : 4 + op.attrs["n"]]) + 20
        else:
            coded = [op.ins[4 + i] for i in op.attrs["quantized"]]
            assert 0 < len(coded) < len(matrices)
            wide = sum(v.size for v in op.ins[4 : 4 + op.attrs["n"]]) - sum(v.size for v in coded)
            assert optimizers.moved(op) == element * sum(v.size for v in coded) + (2 + 4 + 16) * wide + 20


def test_the_contents_of_an_update_have_the_dtypes_of_its_inputs(benchmarks: Any) -> None:
    optimizers = benchmarks("optimizers")
    g = Value(name="g", shape=(2, 3), dtype="bf16", role="grad")
    p, m, v = (Value(name=n, shape=(2, 3), dtype="fp32", role="state") for n in ("p", "m", "v"))
    scalars = [
        Value(name=f"s{i}", shape=(), dtype=d, role="input") for i, d in enumerate(("fp32", "fp32", "int32", "int64"))
    ]
    found = dict(optimizers.contents(Op("adamw", (*scalars, g, p, m, v), (p, m, v), {"n": 1}), "cpu"))
    assert [str(found[x].dtype).removeprefix("torch.") for x in (*scalars, g, p)] == [
        "float32",
        "float32",
        "int32",
        "int64",
        "bfloat16",
        "float32",
    ]
    assert found[m].count_nonzero() == 0 and found[g].count_nonzero() == 6


def test_the_guide_shows_the_scaling_that_is_planned(benchmarks: Any) -> None:
    scaling = benchmarks("published_scaling")
    guide = (ROOT / "docs/scaling.md").read_text().splitlines()
    start = guide.index(f"| {' | '.join(scaling.HEADINGS)} |")
    shown = guide[start : start + 2 + len(scaling.RUNS)]
    assert [line.split(" | ")[0] for line in shown[2:]] == [f"| {measured.by}" for measured in scaling.RUNS]
    some = [0, 2]  # all take 15 seconds
    assert list(scaling.lines([scaling.RUNS[i] for i in some])) == [*shown[:2], *(shown[2 + i] for i in some)]


def test_what_is_kept_of_an_adapter_is_all_without_rounding_and_nothing_on_a_coarse_grid(
    benchmarks: Any, tmp_path: Path
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    merged_base = benchmarks("merged_base")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float32)
    weights = {n: x.clone() for n, x in model.state_dict().items() if n.endswith("_proj.weight")}
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False))
    peft.save_pretrained(tmp_path)
    change = merged_base.change_of(tmp_path, weights)
    merged = peft.merge_and_unload().state_dict()
    assert all(torch.allclose(weights[n] + change[n], merged[n], atol=1e-6) for n in weights)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float32)
    ids = torch.arange(64).view(2, 32)
    once, twice = merged_base.kept(model, lambda matrices: dict(matrices), change, ids, 0.1)
    assert once == pytest.approx(1, abs=1e-3) and twice == pytest.approx(1, abs=1e-3)
    step = 8 * max(float(x.abs().max()) for x in model.state_dict().values())
    coarse = merged_base.kept(model, lambda m: {n: (x / step).round() * step for n, x in m.items()}, change, ids, 1e-2)
    assert coarse == pytest.approx((0, 0), abs=1e-6)
