"""What a change of the core must leave as it is: programs after every pass, planned bytes and losses.

In `tests/`, `python -m unchanged.record` writes it to `recorded.json`, and prints what is no longer as it was. Do so in
a change that means to change it, and say there why.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from end_to_end.product import documents, write_jsonl, write_model
from models.test_published import PUBLISHED
from models.test_published import config_of as published_config
from safetensors.torch import save_file
from torch.backends import cpu as processor
from unchanged.draw import DrawnRun, config_of, draw

from surogate import run
from surogate_core.assembly.assemble import trace
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import SurogateError
from surogate_core.machine.devices import cpu
from surogate_core.planning.plan import Plan
from surogate_core.program.op import Op, Program
from surogate_core.program.value import Value

HERE = Path(__file__).parent
FILE = HERE / "recorded.json"
STEPS, SAVED = 3, 1
WORDS = ["to be", "or not", "that is", "the question", "whether", "nobler", "in the mind", "to suffer"]
QWEN3_8B = json.loads((HERE.parents[1] / "examples/qwen3-8b/config.json").read_text())
QWEN3_30B: Mapping[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-30B-A3B": QWEN3_30B,
    **{name: published_config(name) for name in PUBLISHED},
}
LORA: Mapping[str, Any] = {"lora": True, "from_scratch": False}
LARGE: Mapping[str, tuple[str, str, int, Mapping[str, Any]]] = {
    "8B": ("Qwen3-8B", "h200", 1, {}),
    "8B on 24 GB": ("Llama-3.1-8B", "rtx4090", 1, LORA | {"qlora_bnb": True, "lmhead_chunks": 8}),
    "8B, FP8, level 3": ("Qwen3-8B", "h100", 8, {"recipe": "fp8-hybrid", "zero_level": 3, "offload_optimizer": True}),
    "7B, NVFP4": ("Mistral-7B-v0.1", "b200", 2, {"recipe": "nvfp4", "optimizer": "normuon"}),
    "70B, FP4 base": ("Llama-3.1-70B", "b200", 1, LORA | {"qlora_fp4": True, "offload_residual": True}),
    "30B of experts": ("Qwen3-30B-A3B", "h200", 8, {"zero_level": 2}),
    "2B, chunks": ("gemma-2-2b", "rtx4090", 1, {"optimizer": "adamw_8bit", "attn_bwd_chunks": 2}),
}
"""{name: (model, device, GPUs, keys)} of plans of published models."""
SEARCHED: Mapping[str, tuple[str, str, int]] = {"8B": ("auto", "h100", 1), "8B, FP8, level 3": ("40GiB", "h100", 8)}
"""{name in LARGE: (target, device, GPUs)} of searches for settings that fit."""
LARGE_KEYS: Mapping[str, Any] = {"sequence_len": 4096, "per_device_train_batch_size": 2, "from_scratch": True}


def hashed(lines: Iterable[object]) -> str:
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()[:12]


def processor_and_torch() -> str:
    """Return a hash that is equal where losses have equal bits: of the processor, what torch uses of it, and torch."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return hashed([line, processor.get_cpu_capability(), torch.__version__, torch.get_num_threads()])
    return "unknown"


# ---------------------------------------------------------------------------------------------------------- the plans


class Texts:
    """Texts of values, ops and programs with all that matters of them, each made once."""

    def __init__(self) -> None:
        self._values: dict[Value, str] = {}
        self._ops: dict[Op, str] = {}

    def value(self, v: Value) -> str:
        if v not in self._values:
            inside = self.value(v.inside) if v.inside else None
            self._values[v] = repr([inside if f.name == "inside" else getattr(v, f.name) for f in fields(v)])
        return self._values[v]

    def op(self, op: Op) -> str:
        """Return all of an op but the line of code that emitted it."""
        if op not in self._ops:
            emitter = op.emitter and (op.emitter.kind, op.emitter.name)
            how = (
                op.kind,
                op.block,
                op.phase,
                op.lane,
                sorted(op.accumulate),
                [*op.in_place.items()],
                op.changes,
                emitter,
            )
            values = (self.value(v) for v in (*op.ins, *op.outs))
            self._ops[op] = hashed([how, len(op.ins), [*op.attrs.items()], *values])
        return self._ops[op]

    def program(self, program: Program) -> str:
        others = [getattr(program, f.name) for f in fields(program) if f.name not in ("ops", "outputs")]
        return hashed([others, *map(self.value, program.outputs), *map(self.op, program.ops)])


def programs_of(plan: Plan) -> dict[str, str]:
    """Return {program: "pass:hash" for each pass that made it, in their order}."""
    found: dict[str, list[str]] = {}
    texts = Texts()
    for ran in trace(plan.inputs).passed.passes:
        assert ran.programs is not None
        found.setdefault(ran.program, []).append(f"{ran.name}:{texts.program(ran.programs[1])}")
    return {name: ", ".join(passes) for name, passes in found.items()}


def values_of(assembly: Assembly) -> str:
    """Return a hash of the values of a run, and of their places."""
    memory = assembly.memory
    named = (
        [[v.name for v in assembly.trainable], [v.name for v in assembly.pending], [v.name for v in assembly.cached]],
        [[name, [v.name for v in states]] for name, states in assembly.stored.items()],
        [[s.program.name, [[v.name, at.name] for v, at in s.places.items()]] for s in assembly.staging],
        [[r.name, r.per, r.step.name, r.evaluation.name] for r in assembly.reported],
        [[n, v.name] for n, v in assembly.cu_seqlens.items()],
        [[name, [p.name for p in programs]] for name, programs in assembly.variants.items()],
        [[m.param, [t.name for t in m.tensors]] for m in assembly.weights],
        [*assembly.programs, assembly.grad_norm.name, sorted(assembly.kernels.providers.items())],
        [assembly.batch.lmhead_chunks, assembly.numerics and assembly.numerics.values.name],
        [[name, arena.arena_bytes, arena.lower_bound] for name, arena in memory.arenas.items()],
        [[v.name, at] for arena in memory.arenas.values() for v, at in arena.offsets.items()],
    )
    return hashed([*map(Texts().value, assembly.declared), *named])


def plan_of(plan: Plan) -> dict[str, Any]:
    report = plan.report
    return {
        "device bytes": dict(report.device_bytes),
        "host bytes": dict(report.host_bytes),
        "step": f"{report.step.seconds:.9g} s",
        "recomputed": str(plan.chosen) if plan.chosen else "",
        "values": values_of(plan.assembly),
    }


def tiny_plan(drawn: DrawnRun, folder: Path) -> dict[str, Any]:
    """Return what is recorded of the plan of a drawn run; of one that is refused, that it is."""
    try:
        plan = run.plan(run.load(config(drawn, folder)), drawn.device, drawn.ranks if drawn.device != "cpu" else None)
    except SurogateError:
        return {"refused": True}
    return {"programs": programs_of(plan), **plan_of(plan)}


def large(name: str, folder: Path) -> tuple[run.LoadedConfig, str, int]:
    model, device, gpus, keys = LARGE[name]
    place = folder / model
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(MODELS[model]))
    given = {"model": str(place), "output_dir": str(folder / "out"), **LARGE_KEYS, **keys}
    return run.load(given), device, gpus


def large_plan(name: str, folder: Path) -> dict[str, Any]:
    return plan_of(run.plan(*large(name, folder)))


def search(name: str, folder: Path) -> list[Any]:
    target, device, gpus = SEARCHED[name]
    fit = run.fit(large(name, folder)[0], target, device, gpus)
    return [
        [dict(p.changes), p.fits, f"{p.plan.report.step.seconds:.9g} s", p.plan.report.device_bytes["total"]]
        for p in fit.proposals
    ]


# ---------------------------------------------------------------------------------------------------------- the losses


def prepare(folder: Path) -> None:
    """Write the data of all runs."""
    write_jsonl(folder / "next token.jsonl", documents(60))
    pairs = [{"prompt": WORDS[i % 8], "chosen": WORDS[(i + 1) % 8], "rejected": WORDS[(i + 3) % 8]} for i in range(60)]
    answers = [{"prompt": WORDS[i % 8], "completion": WORDS[(i + i // 8) % 8], "label": i % 3 > 0} for i in range(60)]
    for name, rows in (("pairs", pairs), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model_of("qwen3", folder, weights=True)  # also the teacher


def model_of(family: str, folder: Path, *, weights: bool) -> Path:
    """Return the folder of a tiny model, with the tokenizer of the examples."""
    place = folder / f"{family}{' with weights' if weights else ''}"
    if place.exists():
        return place
    write_model(place)
    (place / "config.json").write_text(json.dumps(config_of(family)))
    if weights:
        given = {"model": str(place), "output_dir": str(folder / "none"), "from_scratch": True, "sequence_len": 64}
        maps = run.plan(run.load(given), cpu()).assembly.weights
        generator = torch.Generator().manual_seed(3)
        tensors = {t.name: torch.randn(t.shape, generator=generator) for m in maps for t in m.tensors}
        scaled = {name: 1 + 0.2 * x if x.ndim == 1 else 0.2 * x for name, x in tensors.items()}
        save_file(scaled, place / "model.safetensors", {"format": "pt"})
    return place


def config(drawn: DrawnRun, folder: Path) -> dict[str, Any]:
    """Return the keys of a run on a CPU, whose ranks are threads."""
    kind = {"dpo": "pairs", "orpo": "pairs", "reward": "pairs", "kto": "answers"}.get(drawn.loss, "next token")
    dataset: dict[str, Any] = {"path": str(folder / f"{kind}.jsonl"), "type": "text"}
    if kind != "next token":
        dataset |= {
            "type": "preference" if kind == "pairs" else "labelled",
            "text_as": "text",
            "prompt_field": "prompt",
        }
    keys: dict[str, Any] = {
        "model": str(model_of(drawn.family, folder, weights=drawn.needs_weights)),
        "from_scratch": not drawn.needs_weights,
        "datasets": [dataset],
        "output_dir": str(folder / drawn.name[:2]),
        **drawn.keys,
    }
    if drawn.loss == "distillation":
        keys["distillation_teacher"] = str(folder / "qwen3 with weights")
    if drawn.device == "cpu":
        keys["ranks_per_gpu"] = drawn.ranks
    return keys


def losses(drawn: DrawnRun, folder: Path) -> list[float]:
    """Train a drawn run on the CPU and return the losses of its steps and of the evaluation at the end.

    One that is `resumed` is saved after its first step and trained again from there.
    """
    out = folder / f"{drawn.name[:2]} trained"
    keys = config(drawn, folder) | {"output_dir": str(out), "ranks_per_gpu": drawn.ranks, "max_steps": STEPS}
    keys |= {"save_steps": SAVED, "validation_split_ratio": 0.2, "eval_samples": 4, "verify_outputs": False}
    run.train(run.load(keys), lambda line: None)
    if drawn.resumed:
        from_step = {"resume_from_checkpoint": str(out / f"step_{SAVED:08d}"), "overwrite_output_dir": True}
        run.train(run.load(keys | from_step), lambda line: None)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["log"] in ("step", "eval")]


# ------------------------------------------------------------------------------------------------------------ the file


def everything(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    prepare(folder)
    runs = draw()
    found: dict[str, Any] = {"processor and torch": processor_and_torch(), "runs": {}, "losses": {}}
    for drawn in runs:
        say(drawn.name)
        found["runs"][drawn.name] = tiny_plan(drawn, folder)
        if drawn.trained and "refused" not in found["runs"][drawn.name]:
            found["losses"][drawn.name] = losses(drawn, folder)
    found["large"] = {name: large_plan(name, folder) for name in LARGE}
    found["searches"] = {name: search(name, folder) for name in SEARCHED}
    return found


def main() -> None:
    gc.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        found = everything(Path(folder), lambda line: print(line, flush=True))
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    for part, values in found.items():
        for name in values if isinstance(values, dict) else ():
            if before.get(part, {}).get(name) != values[name]:
                print(f"{part}: {name} is not as it was")
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
