"""Runs Surogate's programs and the model of transformers on the same weights and documents, and compares results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from surogate_core.api import NoOptions, PrecisionRequest, Value
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.memory.plan import plan_programs
from surogate_core.program.passes.dead_code import dead_code
from surogate_core.program.verify import verify
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.comms.single import SingleComm
from surogate_core.runtime.reference import ReferenceExecutor
from surogate_core.standard_ops import OPS as STANDARD_OPS
from surogate_core.standard_ops.next_token import LOSSES
from surogate_dora.ops import OPS as DORA_OPS
from surogate_lora.ops import OPS as LORA_OPS
from surogate_loss_distillation.ops import OPS as DISTILLATION_OPS
from surogate_loss_preference.kto import KTO_OPS
from surogate_loss_preference.ops import OPS as PREFERENCE_OPS
from surogate_loss_tokens.ops import OPS as TOKENS_OPS
from surogate_models.llama import LLAMA
from surogate_models.ops import OPS as MODEL_OPS
from surogate_models.qwen2 import QWEN2
from surogate_models.qwen3 import QWEN3
from surogate_models.smollm3 import SMOLLM3
from surogate_models_gemma.gemma import GEMMA2, GEMMA3
from surogate_models_gemma.ops import OPS as GEMMA_OPS
from surogate_models_gptoss.gpt_oss import GPT_OSS
from surogate_models_gptoss.ops import OPS as SINK_OPS
from surogate_models_hybrid.ops import OPS as HYBRID_OPS
from surogate_models_hybrid.qwen3_5 import QWEN3_5
from surogate_models_hybrid.qwen3_5_moe import QWEN3_5_MOE
from surogate_models_hybrid.qwen3_next import QWEN3_NEXT
from surogate_models_mistral.ministral3 import MINISTRAL3
from surogate_models_mistral.mistral import MINISTRAL, MISTRAL
from surogate_models_mla.families import DEEPSEEK_V3, GLM4_MOE_LITE
from surogate_models_mla.ops import OPS as MLA_OPS
from surogate_models_moe.glm4_moe import GLM4_MOE
from surogate_models_moe.olmoe import OLMOE
from surogate_models_moe.ops import OPS as MOE_OPS
from surogate_models_moe.qwen2_moe import QWEN2_MOE
from surogate_models_moe.qwen3_moe import QWEN3_MOE
from surogate_models_olmo.olmo import OLMO2, OLMO3
from surogate_models_phi.phi3 import PHI3
from surogate_optim_adamw.adamw import ADAMW, ADAMW_OP, AdamWOptions
from surogate_qlora_fp4.ops import OPS as FP4_OPS
from surogate_qlora_fp8.ops import OPS as FP8_TILE_OPS
from surogate_qlora_mxfp4.ops import OPS as MXFP4_OPS
from surogate_qlora_nf4.ops import OPS as NF4_OPS
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_fp8.ops import OPS as FP8_OPS
from surogate_recipes_nvfp4.ops import OPS as NVFP4_OPS

LOSS_OPS = (*TOKENS_OPS, *PREFERENCE_OPS, *KTO_OPS, *DISTILLATION_OPS)
STORAGE_OPS = (*NF4_OPS, *FP8_TILE_OPS, *FP4_OPS, *MXFP4_OPS)
OPS = {
    definition.kind: definition
    for definition in (
        *STANDARD_OPS,
        *MODEL_OPS,
        *GEMMA_OPS,
        *MOE_OPS,
        *HYBRID_OPS,
        *SINK_OPS,
        *MLA_OPS,
        *LORA_OPS,
        *DORA_OPS,
        *FP8_OPS,
        *NVFP4_OPS,
        *STORAGE_OPS,
        *LOSS_OPS,
        ADAMW_OP,
    )
}
FAMILIES = (
    *(LLAMA, QWEN2, QWEN3, SMOLLM3, MISTRAL, MINISTRAL, MINISTRAL3, GEMMA2, GEMMA3),
    *(OLMO2, OLMO3, PHI3, QWEN3_MOE, OLMOE, GLM4_MOE, QWEN2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, GPT_OSS),
    *(GLM4_MOE_LITE, DEEPSEEK_V3),
)
MODELS = {model.model_types[0]: model for model in FAMILIES}
NO_LABEL = -100

Document = Sequence[int]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return a tiny config, of a Qwen3 unless `model_type` is given.

    It has four layers, two query heads per group and a head_dim (16) different from d_model / n_heads (12).
    """
    config = {
        "architectures": [MODELS[changes.get("model_type", "qwen3")].architectures[0]],
        "model_type": "qwen3",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return config | changes


def random_hf_model(config: Mapping[str, Any], seed: int = 0, by: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Return the model of transformers in fp32 with random weights, of the class `by`.

    Norm weights vary around 1 and biases around 0, so that an error in either changes the results. Decays of a
    recurrence are slow, so that a state that leaks into the next document does, and convolutions are not near 0.
    """
    torch.manual_seed(seed)
    model: PreTrainedModel = by.from_config(
        AutoConfig.for_model(**deepcopy(config)), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.normal_(0, 0.3)  # the first choice of a token is far from the second
            elif name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif name.endswith("A_log"):
                parameter.normal_(-3, 1)
            elif name.endswith("conv1d.weight"):
                parameter.normal_(0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.1)
    return model.train()


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return all that a checkpoint of a model of transformers has, each tensor once: parameters, then buffers."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def as_stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model of transformers by the names of its checkpoints, which have one matrix an expert, or,
    if experts have biases, a stack."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, which = name.rpartition(".")
        if not experts.endswith(".experts") or f"{experts}.down_proj_bias" in tensors:
            stored[name] = tensor
            continue
        names = which.removesuffix("_proj").split("_")
        for e, matrix in enumerate(tensor):
            parts = zip(names, matrix.chunk(len(names)), strict=True)
            stored |= {f"{experts}.{e}.{part}_proj.weight": rows for part, rows in parts}
    return stored


def random_documents(lengths: Sequence[int], vocab_size: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def packed_documents() -> list[list[list[int]]]:
    """Return random documents in rows, of one and of several."""
    lengths = [[7, 12, 5], [24], [2, 9, 3]]
    flat = iter(random_documents([n for row in lengths for n in row], tiny_config()["vocab_size"]))
    return [[next(flat) for _ in row] for row in lengths]


def hf_loss_sum(model: PreTrainedModel, documents: Sequence[Document]) -> Tensor:
    """Return the sum of cross-entropies over all predicted tokens.

    Each document is a row of its own, without padding. Those of a length are rows of one batch.
    """
    total = torch.zeros(())
    for length in dict.fromkeys(map(len, documents)):
        ids = torch.tensor([document for document in documents if len(document) == length])
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total = total + F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    return total


def valid_tokens(documents: Sequence[Document]) -> int:
    return sum(len(document) - 1 for document in documents)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference, relative to theirs. Both are zero of experts without tokens."""
    difference, norm = float((ours - theirs).norm()), float(theirs.norm())
    return difference / norm if norm else difference


def plan_inputs(config: Mapping[str, Any], **changes: Any) -> PlanInputs:
    """Return what `assemble` needs for a config: by default 2 rows of 16 tokens, at most 4 documents.

    `changes` are fields of PlanInputs, and `request`, a PrecisionRequest (default fp32).
    """
    request = changes.pop("request", PrecisionRequest(model_dtype="fp32"))
    definition = MODELS[config["model_type"]]
    given = PlanInputs(
        ops=OPS,
        model=definition,
        dims=definition.dims(config),
        loss=LOSSES[0],
        loss_options=NoOptions(),
        recipe=BF16,
        recipe_options=NoOptions(),
        optimizer=ADAMW,
        optimizer_options=AdamWOptions(),
        precision=BF16.precision(request, NoOptions()),
        batch_size=2,
        seq_len=16,
        max_documents=4,
    )
    return replace(given, **changes)


class PlannedModel:
    """The programs of a config in planned buffers.

    Inputs are rows of documents. Memory of dead values is poisoned.
    """

    def __init__(self, config: Mapping[str, Any], batch_size: int, seq_len: int, **settings: Any) -> None:
        """`settings` are those of `plan_inputs`. The maximum number of documents is the number of tokens."""
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "max_documents": batch_size * seq_len}
        given = plan_inputs(config, **sizes, **settings)
        self.dims = given.dims
        self.assembly = assemble(given)
        self.buffers = Buffers(self.assembly.memory, poison=True)
        comm = SingleComm(world_size=given.world_size)  # the programs of several ranks are looked at, never run
        self.executor = ReferenceExecutor(self.assembly.programs, OPS, self.buffers, comm, poison=True)
        self.params = {name: self.buffers.persistent(value) for name, value in self.assembly.params.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of a checkpoint, or of a model of transformers, into the params."""
        if not {t.name for m in self.assembly.weights for t in m.tensors} <= tensors.keys():
            tensors = as_stored(tensors)
        for m in self.assembly.weights:
            self.params[m.param].copy_(torch.cat([t.load(tensors[t.name]) for t in m.tensors]))

    def split(self, by_param: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert {param name: tensor} to {name of a checkpoint tensor: what it has of it}."""
        return {
            t.name: t.save(part)
            for m in self.assembly.weights
            if m.trained or m.param in by_param
            for t, part in zip(m.tensors, by_param[m.param].split([t.rows[0] for t in m.tensors]), strict=True)
        }

    def write(self, rows: Sequence[Sequence[Document]], loss_scale: float) -> None:
        """Fill the inputs with rows of consecutive documents. An unlabelled document pads each row to `seq_len`."""
        seq_len = self.assembly.batch.seq_len
        tokens: list[int] = []
        targets: list[int] = []
        starts = [0]
        for row in rows:
            padding = seq_len - sum(map(len, row))
            for document in row:
                tokens += document
                targets += [*document[1:], NO_LABEL]
                starts.append(len(tokens))
            if padding:
                tokens += [0] * padding
                targets += [NO_LABEL] * padding
                starts.append(len(tokens))
        positions = [i for a, b in pairwise(starts) for i in range(b - a)]
        batch = self.assembly.batch
        inputs = {
            batch.tokens: tokens,
            batch.targets: targets,
            batch.positions: positions,
            batch.cu_seqlens: starts + [len(tokens)] * (batch.cu_seqlens.shape[0] - len(starts)),
            batch.loss_scale: loss_scale,
        }
        for value, content in inputs.items():
            view = self.buffers.persistent(value)
            view.copy_(torch.tensor(content, dtype=view.dtype))

    def micro_step(self, rows: Sequence[Sequence[Document]], loss_scale: float, *, first: bool = True) -> float:
        """Run a micro-step and return the accumulated loss of the optimizer step."""
        self.write(rows, loss_scale)
        self.executor.run("micro_first" if first else "micro_next")
        return float(self.buffers.persistent(self.assembly.loss))

    def update(self, step: int, lr: float) -> None:
        scalars = self.assembly.scalars
        rates = [(value, lr * factor) for factor, value in scalars.rates.items()]
        for value, content in (
            *rates,
            (scalars.lr, lr),
            (scalars.step, step),
            (scalars.micro_step, step),
            (scalars.seed, 0),
        ):
            self.buffers.persistent(value).fill_(content)
        self.executor.run("update")

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients by checkpoint tensor name."""
        values = {v.name.removeprefix("grad."): v for v in self.assembly.declared if v.role == "grad"}
        return self.split({name: self.buffers.persistent(value) for name, value in values.items()})

    def written(self, values: Sequence[Value], rows: Sequence[Sequence[Document]]) -> list[Tensor]:
        """Return what the evaluation program writes to `values` on the way to its loss, which is left out."""
        evaluate = self.assembly.programs["evaluate"]
        program = dead_code(replace(evaluate, name="written", outputs=tuple(values)), OPS)
        verify(program, OPS)
        memory = plan_programs([program], self.assembly.declared, lambda op: OPS[op.kind].workspace(op))
        buffers = Buffers(memory, poison=True)
        self.write(rows, 1.0)
        for value in self.assembly.declared:
            if value.role in ("param", "input"):
                buffers.persistent(value).copy_(self.buffers.persistent(value))
        ReferenceExecutor({"written": program}, OPS, buffers, poison=True).run("written")
        return [buffers.view(value, "written") for value in values]

    def logits(self, rows: Sequence[Sequence[Document]]) -> Tensor:
        """Return the logits [T, V]: the final norm times the LM head."""
        head = next(op for op in self.assembly.programs["evaluate"].ops if op.kind == "lm_head_ce")
        norm, lm_head = head.ins[:2]
        logits = self.written([norm], rows)[0] @ self.params[lm_head.name].T
        cap = head.attrs.get("softcap", 0.0)
        return cap * (logits / cap).tanh() if cap else logits
