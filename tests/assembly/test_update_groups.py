"""Groups of params: any grouping gives the same bits. Kinds and logical matrices, which optimizers choose by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch
from models.harness import PlannedModel, plan_inputs, random_documents, tiny_config, valid_tokens
from torch import Tensor

from surogate_core.api import Matrix, PrecisionRequest, TrainedParam, UpdateContext
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.inputs import Grouping, Groups, by_block, one_group
from surogate_core.runtime.initialize import initialize
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_optim_adamw.adamw import ADAMW

CONFIG = tiny_config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, head_dim=8)
ROWS = [[document] for document in random_documents([16, 11], CONFIG["vocab_size"])]
SCALE = 1 / valid_tokens([document for row in ROWS for document in row])
BF16 = PrecisionRequest(model_dtype="bf16", param_grad_dtype="bf16", optimizer_state_dtype="bf16")
MASTERS = PrecisionRequest(model_dtype="bf16", master_dtype="fp32")


def trained(steps: int = 2, **settings: Any) -> dict[str, Tensor]:
    """Return the bits of params, gradients and states after some steps."""
    model = PlannedModel(CONFIG, 2, 16, weight_decay=0.1, max_grad_norm=1.0, **settings)
    initialize((v for v in model.assembly.declared if v.init), model.buffers.persistent, seed=3)
    model.executor.run("start")
    for step in range(1, steps + 1):
        model.micro_step(ROWS, SCALE)
        model.update(step, lr=1e-2)
    kept = [v for v in model.assembly.declared if v.role in ("param", "grad", "state")]
    return {v.name: model.buffers.persistent(v).clone().reshape(-1).view(torch.uint8) for v in kept}


def at_random(seed: int) -> Grouping:
    def groups(params: Sequence[TrainedParam]) -> Groups:
        random = Random(seed)
        parts: dict[int, list[TrainedParam]] = {}
        for p in random.sample(list(params), len(params)):
            parts.setdefault(random.randrange(5), []).append(p)
        return tuple(parts.values())

    return groups


@pytest.mark.parametrize(
    "request_", [PrecisionRequest(model_dtype="fp32"), BF16, MASTERS], ids=["fp32", "bf16", "both"]
)
@pytest.mark.parametrize("grouping", [by_block, *map(at_random, range(3))], ids=["block", "0", "1", "2"])
def test_an_update_in_groups_gives_the_same_bits_as_one_of_all_params(
    request_: PrecisionRequest, grouping: Grouping
) -> None:
    whole = trained(request=request_)
    parts = trained(request=request_, update_groups=grouping)
    assert whole.keys() == parts.keys()
    assert [name for name, bits in whole.items() if not torch.equal(bits, parts[name])] == []


def test_the_optimizer_is_called_once_for_each_group() -> None:
    def blocks(grouping: Grouping) -> list[set[int]]:
        seen: list[set[int]] = []

        def update(context: UpdateContext) -> None:
            seen.append({p.param.block for p in context.params})
            ADAMW.update(context)

        optimizer = type(ADAMW)(name="seen", summary="", options=ADAMW.options, update=update)
        assembly = assemble(plan_inputs(CONFIG, optimizer=optimizer, update_groups=grouping))
        assert [op.kind for op in assembly.programs["update"].ops] == ["global_norm"] + ["adamw"] * len(seen)
        return seen

    assert blocks(one_group) == [{-1, 0, 1, 2}]
    assert blocks(by_block) == [{-1}, {0}, {1}, {2}, {-1}, {-1}]  # embedding, blocks, norm, LM head


def grouped(config: Mapping[str, Any] = CONFIG, **settings: Any) -> dict[str, TrainedParam]:
    """Return the trained params of a config as the optimizer gets them, by name."""
    params: dict[str, TrainedParam] = {}

    def update(context: UpdateContext) -> None:
        params.update({p.param.name: p for p in context.params})
        ADAMW.update(context)

    optimizer = type(ADAMW)(name="seen", summary="", options=ADAMW.options, update=update)
    assemble(plan_inputs(config, optimizer=optimizer, **settings))
    return params


def test_the_kind_of_a_param_follows_from_the_op_that_reads_it() -> None:
    params = grouped()
    assert params["embedding"].kind == "embedding" and params["lm_head"].kind == "head"
    assert {p.kind for name, p in params.items() if "norm" in name} == {"vector"}
    assert {p.kind for name, p in params.items() if name.endswith(("qkv", "attn.o", "gate_up", "down"))} == {"matrix"}
    assert all(p.of_model for p in params.values())
    assert grouped(tiny_config(tie_word_embeddings=True))["embedding"].kind == "embedding"


def test_the_matrices_of_a_fused_param_are_those_of_its_checkpoint_tensors() -> None:
    params = grouped()
    projections = [Matrix(f"model.layers.1.self_attn.{x}_proj.weight", n) for x, n in (("q", 32), ("k", 16), ("v", 16))]
    assert params["layers.1.attn.qkv"].matrices == tuple(projections)
    assert [m.rows for m in params["layers.1.mlp.gate_up"].matrices] == [40, 40]
    assert params["layers.1.mlp.down"].matrices == (Matrix("model.layers.1.mlp.down_proj.weight", 24),)
    assert params["norm"].matrices == ()
    for p in params.values():
        assert sum(m.rows for m in p.matrices) == (p.param.shape[0] if p.kind != "vector" else 0)


def test_each_param_of_an_adapter_is_one_matrix_that_is_not_stored() -> None:
    params = grouped(adapters=[(LORA, LoraOptions(lora_rank=4))])
    assert params and not any(p.of_model for p in params.values())
    for name, p in params.items():
        assert p.kind == "matrix" and p.matrices == (Matrix(name, p.param.shape[0]),)
