"""A tiny model under any recipe on the CPU, in planned buffers, run program by program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from models.harness import plan_inputs, random_documents, valid_tokens
from pydantic import BaseModel
from torch import Tensor

from surogate_core.api import PrecisionRequest, Program, RecipeDef, Value
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.program.op import Purpose
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.reference import ReferenceExecutor
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_recipes_bf16.recipe import BF16

ROWS, LENGTH = 2, 32


class Model:
    """A tiny model in planned buffers. Memory of dead values is poisoned."""

    def __init__(
        self, config: Mapping[str, Any], *, recipe: RecipeDef = BF16, options: BaseModel | None = None, **changes: Any
    ) -> None:
        """`changes` are those of `plan_inputs`. `request` completes a `model_dtype` of bf16."""
        request = PrecisionRequest(model_dtype="bf16", **changes.pop("request", {}))
        chosen = options if options is not None else recipe.options()
        settings: dict[str, Any] = {
            "batch_size": ROWS,
            "seq_len": LENGTH,
            "max_documents": ROWS * LENGTH,
            "recipe": recipe,
            "recipe_options": chosen,
            "precision": recipe.precision(request, chosen),
        }
        self.vocabulary = config["vocab_size"]
        self.inputs = plan_inputs(config, **(settings | changes))
        self.assembly: Assembly = assemble(self.inputs)
        self.buffers = Buffers(self.assembly.memory, poison=True)
        self.executor = ReferenceExecutor(self.assembly.all_programs, self.inputs.ops, self.buffers, poison=True)
        self.view = self.buffers.persistent
        self.steps = 0
        self.calibrating = self.assembly.calibrates
        initialize((v for v in self.assembly.allocated if v.init), self.view, 3)
        for part in self.assembly.staging:
            places = part.places.items()
            initialize(part.places, {p: self.buffers.view(v, part.program.name) for p, v in places}.__getitem__, 3)
            self.executor.run(part.program.name)
        self.executor.run("start")
        self.executor.run("derive")

    def write(self, seed: int, scale: float | None = None) -> None:
        documents = random_documents([LENGTH] * ROWS, self.vocabulary, seed)
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

    def micro_step(
        self, first: bool, seed: int, scale: float | None = None, after: Any = None, index: int | None = None
    ) -> None:
        """Run a micro-step on the documents of `seed`. `index` (default `seed`) draws what rounds stochastically."""
        self.write(seed, scale)
        self.view(self.assembly.scalars.micro_step).fill_(seed if index is None else index)
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
        for value, content in ((scalars.lr, lr), (scalars.step, self.steps)):
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
