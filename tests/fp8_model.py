"""A tiny model under the fp8-hybrid recipe on the CPU, in planned buffers, run program by program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from models.harness import OPS, plan_inputs, random_documents, tiny_config, valid_tokens
from torch import Tensor

from surogate_core.api import NoOptions, PrecisionRequest, Program, Value
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.program.op import Purpose
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.initialise import initialise
from surogate_core.runtime.reference import ReferenceExecutor
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_fp8.recipe import E4M3_E5M2, FP8_HYBRID, Fp8Options

LAYERS, ROWS, LENGTH, VOCABULARY = 3, 2, 32, 64
CONFIG = tiny_config(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=LAYERS, head_dim=16)
BIASED = tiny_config(
    model_type="qwen2", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=80, num_hidden_layers=LAYERS
)
PRODUCTS = 4
"""Products with a weight of a block: qkv, o, gate_up, down."""


def options(**changes: Any) -> Fp8Options:
    return Fp8Options.model_validate({"fp8_amax_history": 4} | changes)


class Model:
    """A tiny model in planned buffers. Memory of dead values is poisoned."""

    def __init__(self, config: Mapping[str, Any] = CONFIG, *, fp8: bool = True, **changes: Any) -> None:
        request = PrecisionRequest(model_dtype="bf16", **changes.pop("request", {}))
        settings: dict[str, Any] = {"batch_size": ROWS, "seq_len": LENGTH, "max_documents": ROWS * LENGTH}
        if fp8:
            chosen = options(**changes.pop("options", {}))
            settings |= {"recipe": FP8_HYBRID, "recipe_options": chosen}
            settings["precision"] = FP8_HYBRID.precision(request, chosen)
        else:
            settings["request"] = request
        self.inputs = plan_inputs(config, **(settings | changes))
        self.assembly: Assembly = assemble(self.inputs)
        self.buffers = Buffers(self.assembly.memory, poison=True)
        self.executor = ReferenceExecutor(self.assembly.all_programs, OPS, self.buffers, poison=True)
        self.view = self.buffers.persistent
        self.steps = 0
        self.calibrating = self.assembly.calibrates
        initialise((v for v in self.assembly.allocated if v.init), self.view, 3)
        for part in self.assembly.staging:
            places = part.places.items()
            initialise(part.places, {p: self.buffers.view(v, part.program.name) for p, v in places}.__getitem__, 3)
            self.executor.run(part.program.name)
        self.executor.run("start")
        self.executor.run("derive")

    def write(self, seed: int, scale: float | None = None) -> None:
        documents = random_documents([LENGTH] * ROWS, VOCABULARY, seed)
        batch, tokens = self.assembly.batch, ROWS * LENGTH
        contents: dict[Value, Any] = {
            batch.tokens: [token for document in documents for token in document],
            batch.targets: [target for document in documents for target in (*document[1:], -100)],
            batch.positions: [*range(LENGTH)] * ROWS,
            batch.cu_seqlens: [i * LENGTH for i in range(ROWS)] + [tokens] * (batch.cu_seqlens.shape[0] - ROWS),
            batch.loss_scale: 1 / valid_tokens(documents) if scale is None else scale,
        }
        for value, content in contents.items():
            self.view(value).copy_(torch.tensor(content, dtype=self.view(value).dtype))

    def micro_step(self, first: bool, seed: int, scale: float | None = None, after: Any = None) -> None:
        self.write(seed, scale)
        purpose: Purpose = "calibrate" if self.calibrating else "train"
        program = self.assembly.micro_step(first=first, last=not first, purpose=purpose)
        self.executor.walk(program.name, (lambda index: after(program, index)) if after else (lambda index: None))

    def step(self, scale: float | None = None, after: Any = None, lr: float = 1e-2) -> float:
        """Run an optimizer step of two micro-steps. Return its loss."""
        for index in range(2):
            self.micro_step(index == 0, 2 * self.steps + index, scale, after)
        return self.update(lr)

    def update(self, lr: float = 1e-2) -> float:
        self.steps += 1
        scalars = self.assembly.scalars
        for value, content in ((scalars.lr, lr), (scalars.step, self.steps), (scalars.micro_step, self.steps)):
            self.view(value).fill_(content)
        loss = float(self.view(self.assembly.loss))
        self.executor.run("update")
        self.calibrating &= not self.view(self.assembly.grad_norm).isfinite()
        return loss

    def evaluate(self, seed: int = 99) -> float:
        self.write(seed, 1.0)
        self.executor.run("evaluate")
        return float(self.view(self.assembly.eval_loss))

    def named(self, *roles: str) -> dict[str, Tensor]:
        values = (v for v in self.assembly.allocated if v.role in roles)
        return {v.name: self.view(v).clone().reshape(-1).view(torch.uint8) for v in values}

    def state(self, name: str) -> Tensor:
        return self.view(next(v for v in self.assembly.declared if v.name == name))

    def gradients(self) -> dict[str, Tensor]:
        grads = {v.name.removeprefix("grad."): v for v in self.assembly.declared if v.role == "grad"}
        return {name: self.view(v).float().clone() for name, v in grads.items()}


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def kinds(program: Program) -> Counter[str]:
    return Counter(op.kind for op in program.ops)


def lora_rank_8() -> dict[str, Any]:
    return {"adapters": [(LORA, LoraOptions.model_validate({"lora_rank": 8}))]}


def operands_under_bf16() -> dict[str, Any]:
    """The settings of `recipe: bf16` with FP8 operands."""
    precision = BF16.precision(PrecisionRequest(matmul_dtype="e4m3", gradient_dtype="e5m2"), NoOptions())
    return {"fp8": False, "precision": precision, "lowering": E4M3_E5M2}
