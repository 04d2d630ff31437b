"""The bench: a tiny model, tokenizer and text, and runs on them. A run that several checks need is made once."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from surogate import run
from surogate.reporting import picture
from surogate.runs.plan import plan_run
from surogate.training import start as training
from surogate_core.api import Definition, LossDef, ModelDef, Op, Sharding, Value
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.batch import NO_LABEL, MicroBatch
from surogate_core.errors import SurogateError
from surogate_core.machine.devices import device
from surogate_core.machine.local_device import LocalDevice
from surogate_core.planning.plan import Plan
from surogate_core.runtime.comms import copies
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker
from surogate_models.api import TINY_CONFIG
from surogate_verify.rows import random_rows
from surogate_verify.verification import Extent, Verification, verify

from .check import NotApplicable
from .subject import Subject

LINES = ("to be or not to be", "all the world is a stage", "brevity is the soul of wit", "what is past is prologue")
STEPS = 8
VERIFIED = Extent(rows=4, length=64, random_tokens=True)
"""With fewer tokens, gradients of a tiny model in narrow formats exceed their bounds by chance."""

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder and the loss of every step. notices: lines for the user."""

    folder: Path
    losses: Mapping[int, float]
    notices: tuple[str, ...]

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Return every tensor of the checkpoint after `step` steps, by file and name."""
        folder = self.folder / f"step_{step:08d}"
        files = sorted(folder.rglob("*.safetensors"))
        return {f"{f.relative_to(folder)}: {name}": x for f in files for name, x in load_file(f).items()}


@dataclass(frozen=True)
class Sample:
    """An op as a run executed it, and its inputs.

    read            for each output whether an op of the forward pass reads it
    differentiated  whether the run has its gradient, by its rule or by autograd
    derived         inputs that an op has made of other inputs of this one: the op, and the number of its output
    """

    op: Op
    ins: tuple[Tensor, ...]
    read: tuple[bool, ...]
    differentiated: bool
    derived: Mapping[int, tuple[Op, int]] = field(default_factory=dict)


def unchanged(inputs: PlanInputs) -> PlanInputs:
    return inputs


class Bench:
    """Runs for the checks of a subject, below `folder`."""

    def __init__(self, subject: Subject, folder: Path, target: str = "h200") -> None:
        self.subject = subject
        self.registry = subject.registry
        self.folder = folder
        self.target = target
        self._made: dict[str, Any] = {}
        self.samples: dict[str, list[Sample]] = {}
        self._wanted = {item.name for item in subject.provided if item.kind == "op"}
        self._served = {item.name for item in subject.provided if item.kind == "kernel"}
        self._seen: set[Any] = set()

    # ------------------------------------------------------------------------------------------------------- files

    @cached_property
    def model(self) -> ModelDef:
        """The model that definitions of other kinds are tested with: one of transformers with attention."""
        return self.registry.model_for({"architectures": ["Qwen3ForCausalLM"]})

    def config_of(self, model: ModelDef) -> list[dict[str, Any]]:
        """Return tiny configs of a model: its examples; without one, `TINY_CONFIG`."""
        own = {"architectures": [model.architectures[0]], "model_type": model.model_types[0]}
        return [{**own, **example} for example in self.subject.examples(model) or [{**TINY_CONFIG}]]

    def runs_of(self, model: ModelDef) -> list[dict[str, Any]]:
        """Return the keys of a run of each tiny config of a model.

        What a run keeps of its base, as a tower, is not drawn by a run: transformers draws such a base.
        """
        runs = []
        for config in self.config_of(model):
            with suppress(SurogateError):  # told by the checks of `dims`
                if model.kept_tensors(model.configure(model.dims(config), model.options())):
                    runs.append({"model": str(self.drawn(model, config)), "from_scratch": False})
                    continue
            runs.append({"model": str(self.model_dir(config))})
        return runs

    def drawn(self, model: ModelDef, config: Mapping[str, Any]) -> Path:
        """Return the folder of a model that transformers has drawn."""
        import transformers

        def make() -> Path:
            folder = self._new("base")
            (folder / "config.json").write_text(json.dumps(config))
            with quiet():
                torch.manual_seed(0)
                read = transformers.AutoConfig.from_pretrained(folder)
                getattr(transformers, model.loaded_by).from_config(read, dtype=torch.float32).save_pretrained(folder)
            _write_tokenizer(folder)
            return folder

        return self.once(("drawn", config), make)

    def model_dir(self, config: Mapping[str, Any] | None = None) -> Path:
        """Return a folder with a config.json and a tokenizer of bytes."""
        config = config or self.config_of(self.model)[0]

        def make() -> Path:
            folder = self._new("model")
            (folder / "config.json").write_text(json.dumps(config))
            _write_tokenizer(folder)
            return folder

        return self.once(("model", config), make)

    @cached_property
    def text(self) -> Path:
        path = self.folder / "text.jsonl"
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES * 24))
        return path

    def config(self, keys: Keys, output: Path) -> Path:
        """Write a run.yaml with `keys` over those of a tiny run. None removes a key."""
        base: dict[str, Any] = {
            "model": keys.get("model") or str(self.model_dir()),
            "from_scratch": True,
            "model_dtype": "fp32",
            "optimizer": "adamw",
            "sequence_len": 32,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "datasets": [{"path": str(self.text), "type": "text"}],
            "validation_split_ratio": 0,
            "eval_steps": 0,
            "verify_outputs": False,
            "output_dir": str(output),
        }
        path = self._new("config") / "run.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in {**base, **keys}.items() if v is not None}))
        return path

    def _new(self, stem: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{stem}-", dir=self.folder))

    # -------------------------------------------------------------------------------------------------------- runs

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returned, or raised, for the same key before."""
        key = json.dumps(key, sort_keys=True, default=str)
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                self._made[key] = error
        if isinstance(self._made[key], Exception):
            raise self._made[key]
        return self._made[key]

    def train(self, **keys: Any) -> Trained:
        """Train with `keys` in this process, as `surogate train` does."""

        def make() -> Trained:
            output, notices = self._new("out"), list[str]()
            output.rmdir()
            with quiet():
                result = run.train(run.load(self.config(keys, output)), notices.append)
            if result.signal_exit:  # the run was saved, as its user would want; the suite ends
                raise KeyboardInterrupt
            records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
            losses = {r["step"]: r["loss"] for r in records if r["log"] == "step"}
            return Trained(output, losses, tuple(notices))

        return self.once(("train", keys), make)

    def base(self, dtype: str = "fp32") -> Path:
        """Return the folder of a model with weights."""
        return self.train(max_steps=2, model_dtype=dtype).folder

    def verified(self, **keys: Any) -> Verification:
        """Compare a run with transformers. Raises NotApplicable where that is not possible."""

        def make() -> Verification:
            with quiet():
                path = self.config({"sequence_len": 64, **keys}, self._new("out"))
                return verify(path, (), VERIFIED, notice=lambda line: None)

        return self.once(("verify", keys), make)

    def steps(self, revise: Callable[[PlanInputs], PlanInputs] = unchanged, **keys: Any) -> Steps:
        """Return a run whose steps a check takes one by one."""
        with quiet():
            return Steps(self, self.config(keys, self._new("out")), revise)

    def two_ranks(self, *, states: bool, **keys: Any) -> dict[str, Tensor]:
        """Return weights and states after two steps of two ranks, which divide states or hold all of them."""
        with quiet():
            loaded = run.load(self.config({**keys, "ranks_per_gpu": 2}, self._new("out")))
            opened = run.open_run(loaded, ["*.json", "*.safetensors"])
            sharding = Sharding(parts=2, states=states)
            plan = plan_run(opened, device("cpu"), 2, lambda inputs: replace(inputs, sharding=sharding))
            ops, seed = plan.inputs.ops, loaded.config.train_seed
            comms = copies.connect([0, 0])
            team = Team(comms, lambda comm: Worker.on_cpu(plan.assembly, ops, seed, comm, poison=True))
            try:
                run.fill_weights(opened, plan.assembly, team)
                return _two_steps(team, plan)
            finally:
                team.close()

    def own_runs(self) -> list[dict[str, Any]]:
        """Return the keys of a run for each definition of the subject that a run can select."""
        runs: list[dict[str, Any]] = [{}]
        for item in self.subject.provided:
            definition = item.definition
            if item.kind == "model":
                runs += self.runs_of(definition)
            elif item.kind == "recipe":
                runs.append({"recipe": item.name, "model_dtype": None})
            elif item.kind in ("optimizer", "loss"):
                runs.append({item.kind: item.name, **based(self, definition)})
            elif item.kind in ("adapter", "weight format"):
                keys = {definition.key: True} if item.kind == "weight format" else {}
                adapter = adapter_of(self) if item.kind == "weight format" else item.name
                base = {"adapter": adapter, "model": str(self.base("bf16")), "from_scratch": False}
                runs += [{**base, "model_dtype": "bf16", **keys}]
                runs += [{**base, **keys, "recipe": r, "model_dtype": None} for r in self.registry.names("recipe")]
        return runs

    def sample_ops(self, *, all_dtypes: bool = False) -> None:
        """Run `own_runs` until every op of the subject has samples, or all of them, also in bf16.

        What refuses a run has checks of its own, which tell why.
        """

        def make() -> bool:
            for keys in self.own_runs():
                if not all_dtypes and self._wanted <= self.samples.keys():
                    break
                with suppress(SurogateError):
                    self.steps(**keys).step()
                if all_dtypes and "model_dtype" not in keys:
                    with suppress(SurogateError):
                        self.steps(**keys, model_dtype="bf16").step()
            return True

        self.once(("samples", all_dtypes), make)

    def plan(self, **keys: Any) -> Plan:
        """Plan a run for the device that is tested for."""

        def make() -> Plan:
            with quiet():
                return run.plan(run.load(self.config(keys, self._new("out"))), self.target)

        return self.once(("plan", keys), make)

    def keep(self, sample: Sample) -> None:
        """Keep the inputs of an op of the subject, once for each signature."""
        if sample.op.signature not in self._seen:
            self._seen.add(sample.op.signature)
            copy = replace(sample, ins=tuple(x.clone() for x in sample.ins))
            self.samples.setdefault(sample.op.kind, []).append(copy)


def _derived(op: Op, makers: Mapping[Value, Op]) -> dict[int, tuple[Op, int]]:
    made = {i: makers[value] for i, value in enumerate(op.ins) if value in makers}
    return {i: (by, by.outs.index(op.ins[i])) for i, by in made.items() if {*by.ins} < {*op.ins}}


class Steps:
    """A run of references in planned buffers. The memory of dead values is poisoned."""

    def __init__(self, bench: Bench, config: Path, revise: Callable[[PlanInputs], PlanInputs]) -> None:
        loaded = run.load(config)
        opened = run.open_run(loaded, ["*.json", "*.safetensors"])
        self.plan = plan_run(opened, device("cpu"), 1, revise)
        self.assembly = self.plan.assembly
        self.worker = Worker.on_cpu(self.assembly, self.plan.inputs.ops, loaded.config.train_seed, poison=True)
        self.batch = with_groups(random_rows(self.plan.inputs, seed=3).batch, self.plan.inputs)
        self._count = 0
        self._sample(bench)
        run.fill_weights(opened, self.assembly, self.worker)
        self.worker.start(graphs=False)

    def _sample(self, bench: Bench) -> None:
        """Keep the inputs of the subject's ops when they run."""
        for name, calls in self.worker.executor._calls.items():  # type: ignore[union-attr]
            program = self.assembly.all_programs[name]
            forward = {v for op in program.ops if op.phase == "forward" for v in op.ins}
            makers = {out: op for op in program.ops if op.phase == "forward" for out in op.outs}
            by_autograd = {op.attrs["of"] for op in program.ops if op.kind == "reference_vjp"}
            for i, (op, (run_op, dies)) in enumerate(zip(program.ops, calls, strict=True)):
                if op.kind in bench._wanted | bench._served:
                    rule = bench.registry.ops[op.kind].vjp is not None
                    has_gradient = op.phase == "forward" and (rule or op.kind in by_autograd)
                    read = tuple(out in forward for out in op.outs)
                    sample = Sample(op, (), read, has_gradient, _derived(op, makers))

                    call = run_op.__self__

                    def function(*ins: Tensor, _sample: Sample = sample, _call: Any = call, **attrs: Any) -> Any:
                        bench.keep(replace(_sample, ins=ins))
                        return _call.function(*ins, **attrs)

                    calls[i] = replace(call, function=function).run, dies

    def micro_step(self, *, first: bool = True, last: bool = True, scale: float | None = None, index: int = 1) -> float:
        """Run a micro-step and return the loss so far."""
        scale = 1 / self.batch.n_valid if scale is None else scale
        of_groups = scale * self.batch.n_valid / max(1, self.batch.n_groups)
        self.worker.micro_step(self.batch, first=first, last=last, index=index, loss_scale=scale, group_scale=of_groups)
        return float(self.view(self.assembly.loss))

    def step(self, scale: float | None = None, lr: float = 1e-2) -> float:
        """Take an optimizer step of two micro-steps and return its loss."""
        self._count += 1
        half = None if scale is None else scale
        for i in range(2):
            loss = self.micro_step(first=i == 0, last=i == 1, scale=half, index=2 * self._count + i)
        self.worker.update(lr=lr, step=self._count).values()
        return loss

    @property
    def view(self) -> Callable[..., Tensor]:
        return self.worker.buffers.persistent

    def bits(self, *roles: str) -> dict[str, Tensor]:
        """Return the bytes of everything of these roles but readings, and copies of states that a step may discard."""
        passing = {*self.assembly.readings, *self.assembly.pending}
        values = (v for v in self.assembly.allocated if v.role in roles and v not in passing)
        return {v.name: self.view(v).clone().reshape(-1).view(torch.uint8) for v in values}

    def gradients(self) -> dict[str, Tensor]:
        return {v.name: self.view(v).double() for v in self.assembly.allocated if v.role == "grad"}


def based(bench: Bench, definition: Definition) -> dict[str, Any]:
    """Return the keys that a loss with a reference needs besides its name: a base with an adapter."""
    options = definition.options() if isinstance(definition, LossDef) else None
    if not isinstance(definition, LossDef) or not definition.reference(options):
        return {}
    return {"adapter": adapter_of(bench), "model": str(bench.base()), "from_scratch": False}


def with_groups(batch: MicroBatch, inputs: PlanInputs, only: slice = slice(None)) -> MicroBatch:
    """Return a batch with what the run's loss asks for: neighbours as groups, and columns of drawn numbers.

    only: of the groups, or of the documents if it asks for none. The others lose their labels.
    """
    loss, size = inputs.loss, max(1, inputs.loss.group_size)
    bounds = list(dict.fromkeys(batch.cu_seqlens.tolist()))
    labelled = [(a, b) for a, b in pairwise(bounds) if (batch.targets[a:b] >= 0).any()]
    every = np.array(labelled[: len(labelled) // size * size], np.int32).reshape(-1, size, 2)
    chosen = every[only]
    targets = np.full_like(batch.targets, NO_LABEL)
    for start, stop in chosen.reshape(-1, 2):
        targets[start:stop] = batch.targets[start:stop]
    most = (inputs.max_documents - inputs.batch_size) // size
    asked: dict[str, Any] = {}
    if loss.group_size:
        asked["groups"] = np.zeros((most, size, 2), np.int32)
        asked["groups"][: len(chosen)] = chosen
    for column in loss.columns(inputs.loss_options):
        drawn = np.random.default_rng(7).random((len(targets) + most) * size).astype(np.float32)
        if column.per == "token":
            numbers = np.random.default_rng(7).random((len(targets), *column.shape)).astype(np.float32)
            if column.dtype == "int32":  # as ids: small, and different for a token
                numbers = np.broadcast_to(np.arange(numbers[0].size).reshape(column.shape), numbers.shape)
            numbers = np.where((targets >= 0).reshape(-1, *(1 for _ in column.shape)), numbers, 0)
            asked[f"column.{column.name}"] = numbers.astype(np.int32 if column.dtype == "int32" else np.float32)
        else:
            whole = np.zeros((most, size), np.float32)
            whole[: len(chosen)] = drawn[: len(every) * size].reshape(-1, size)[only]
            asked[f"column.{column.name}"] = whole
    valid, groups = int((targets >= 0).sum()), len(chosen) if loss.group_size else 0
    return replace(batch, targets=targets, n_valid=valid, n_groups=groups, asked=asked)


def _two_steps(team: Team, plan: Plan) -> dict[str, Tensor]:
    """Return the weights and states of the ranks, put together, after two steps of two micro-steps."""
    batches = [random_rows(plan.inputs, seed=seed).batch for seed in (3, 4)]
    scale = 0.5 / sum(batch.n_valid for batch in batches)
    team.start(graphs=False)
    for step in (1, 2):
        for i in range(2):
            team.micro_step(*batches, first=i == 0, last=i == 1, loss_scale=scale, index=4 * step + 2 * i)
        team.update(lr=1e-2, step=step).values()
    team.gather()
    team.settle()
    assembly = plan.assembly
    values = (v for v in assembly.allocated if v.role in ("param", "state") and v not in {*assembly.pending})
    held = {v.name: torch.cat([*team.pieces(v).tensors]) for v in values if v not in assembly.readings}
    return {name: x.reshape(-1).view(torch.uint8).clone() for name, x in held.items()}


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not equal to the bit."""
    same = [n for n in one if n in other and one[n].shape == other[n].shape and torch.equal(one[n], other[n])]
    return sorted((one.keys() | other.keys()) - set(same))


def shown(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def quiet() -> Iterator[None]:
    """Runs in this context are on the CPU, print nothing, and draw no picture, which would take longer than the run."""
    cpu = LocalDevice(device("cpu"), 1, "the suite's runs are")
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(patch.object(picture, "draw_loss"))
        stack.enter_context(patch.object(training, "usable_device", lambda: cpu))
        stack.enter_context(patch.object(training, "device_of_torch", lambda here: cpu.device))
        yield


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<eos>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def adapter_of(bench: Bench) -> str:
    """Return an adapter for runs that need one: PEFT's, which transformers can be compared with, or another."""
    adapters = {name: bench.registry.adapter(name) for name in bench.registry.names("adapter")}
    if not adapters:
        raise NotApplicable("no adapter is installed, which frozen weights need: pip install surogate-lora")
    return next((name for name, adapter in adapters.items() if adapter.library == "peft"), next(iter(adapters)))
