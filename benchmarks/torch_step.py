"""Time and memory of the same training step in PyTorch, made as fast as PyTorch makes it without writing kernels.

    python benchmarks/torch_step.py --model benchmarks/models/qwen3-0.6b --seq-len 2048 --batch 16 --accumulate 2
    python benchmarks/torch_step.py --model benchmarks/models/qwen3-0.6b --seq-len 2048 --batch 2 --accumulate 4 --lora
    python benchmarks/torch_step.py --model benchmarks/models/qwen3-8b --seq-len 2048 --batch 4 --gpus 2 --zero-level 3

The model of transformers with random weights in bf16: torch.compile of each layer, cuDNN attention without a mask, a
compiled cross-entropy that includes the LM head, fused AdamW with bf16 states, clipping of the gradient. With `--lora`
all but the adapters is frozen: PEFT's layers of rank 16 on the seven linear layers of a block, or the same layers
written out below if PEFT is missing. Then the step is timed twice, as it is and with forward and backward captured as a
CUDA graph, which helps where launches take longer than kernels. The faster one is reported. `--fp8` makes the products
of the blocks FP8 by torchao; `--nf4` with `--lora` stores the frozen ones by bitsandbytes, block by block. A row is a
pair of documents with `--dpo`, whose reference is the model without its adapter. Prints one line of JSON.
`--gpus` trains on several: all weights by fully_shard (FSDP2) of each layer, gathered again in the backward pass as of
ZeRO level 3, or kept as of level 2; adapters whole on each, with one sum of their gradients a step.
On a CPU nothing is compiled, because that takes minutes: there the script only shows that it works.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import timed
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DISTINCT_BATCHES = 8
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA, BETA = 16, 32, 0.1
STD = 0.02
ATTENTION = "causal_without_mask"


def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.gpus == 1:
        print(json.dumps(measure(arguments)), flush=True)
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (arguments, port), nprocs=arguments.gpus)


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Run a process of several. The first one prints."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if on_gpu else "gloo", address, rank=rank, world_size=arguments.gpus)
    result = measure(arguments)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="linear layers of the blocks by torchao's tensorwise FP8")
    parser.add_argument("--nf4", action="store_true", help="frozen linear layers by bitsandbytes; with --lora")
    parser.add_argument("--dpo", action="store_true", help="DPO of the two halves of a row; with --lora")
    parser.add_argument("--checkpointing", action="store_true", help="compute the activations of a layer again")
    parser.add_argument("--no-peft", action="store_true", help="the LoRA layers of this file, also where PEFT is there")
    parser.add_argument("--graph", choices=["auto", "never", "only"], default="auto", help="auto: with --lora, as well")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--zero-level", type=int, choices=[2, 3], default=3, help="of all weights on several GPUs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timed steps, at most; three are timed anyway")
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the step as it is and, if asked for, with a captured micro-step. Return the faster one."""
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    device = "cuda" if on_gpu else "cpu"
    model = build(arguments.model, "meta" if arguments.nf4 else device)
    layers = "full"
    if arguments.fp8:
        to_fp8(model)
    if arguments.nf4:
        to_nf4(model, device)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if arguments.lora:
        layers = add_lora(model, peft_wanted=not arguments.no_peft)
    step = Step.of(model, arguments, compiled=on_gpu)
    graph = (
        on_gpu and arguments.gpus == 1 and (arguments.graph == "only" or (arguments.graph == "auto" and arguments.lora))
    )
    found = []
    if arguments.graph != "only" or not on_gpu:
        found.append(timed(awaited(step.run), arguments.warm_up, arguments) | {"captured": False})
    if graph:
        step.capture()
        found.append(timed(awaited(step.run), arguments.warm_up, arguments) | {"captured": True})
    best = min(found, key=lambda result: float(result["step_ms"]))
    tokens = arguments.batch * arguments.seq_len * arguments.accumulate * arguments.gpus
    return {
        "model": Path(arguments.model).name,
        **best,
        "tokens_per_second": round(tokens / best["step_ms"] * 1000),
        "other_ms": [result["step_ms"] for result in found if result is not best],
        "layers": layers,
        "gpus": arguments.gpus,
        "loss": float(step.loss),
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "versions": versions(arguments.lora and layers == "PEFT"),
    }


def build(folder: str, device: str) -> Any:
    """The model with random weights in bf16, whose attention is cuDNN's causal one on a GPU; on "meta" without any."""
    try:
        import transformers
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        sys.exit(f"torch_step.py: transformers is needed ({error}). Install it: pip install 'transformers>=5'.")
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = attention
    ALL_MASK_ATTENTION_FUNCTIONS[ATTENTION] = lambda *arguments, **options: None
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.use_cache = False
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION
        )
    wrong = {str(p.dtype) for p in model.parameters()} - {"torch.bfloat16"}
    if wrong:
        sys.exit(f"torch_step.py: transformers made weights of {', '.join(wrong)}, expected bf16.")
    return model.train()


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Every row is one document: causal attention over the whole row."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def to_fp8(model: Any) -> None:
    """Give the linear layers of the blocks torchao's FP8 training with a scale per tensor."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        sys.exit(f"torch_step.py: --fp8 needs torchao ({error}). Install it: pip install torchao.")
    convert_to_float8_training(model.model.layers, config=Float8LinearConfig.from_recipe_name("tensorwise"))


def to_nf4(model: Any, device: str) -> None:
    """Draw a model that has no weights yet, with the linear layers of its blocks in NF4 with double quantization,
    dequantized to bf16. No more than a block is there in bf16."""
    try:
        import bitsandbytes
    except ImportError as error:
        sys.exit(f"torch_step.py: --nf4 needs bitsandbytes ({error}). Install it: pip install bitsandbytes.")
    blocks = model.model.layers
    for block in blocks:
        draw(block, device)
        for parent in list(block.modules()):
            for name in set(LINEAR) & set(dict(parent.named_children())):
                whole = getattr(parent, name)
                stored = bitsandbytes.nn.Linear4bit(
                    whole.in_features,
                    whole.out_features,
                    bias=whole.bias is not None,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                stored.weight = bitsandbytes.nn.Params4bit(whole.weight.data, requires_grad=False, quant_type="nf4")
                stored.bias = whole.bias
                setattr(parent, name, stored.to(device))
    model.model.layers = nn.ModuleList()
    draw(model, device)
    model.model.layers = blocks
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def draw(module: nn.Module, device: str) -> None:
    """Give a module on "meta" memory and weights. Buffers are left as they come."""
    module.to_empty(device=device)
    for p in module.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=STD)
        else:
            nn.init.ones_(p)


def add_lora(model: Any, peft_wanted: bool) -> str:
    """Freeze the model and put an adapter on every linear layer of its blocks. Return whose adapters they are."""
    try:
        if not peft_wanted:
            raise ImportError
        import peft
    except ImportError:
        for p in model.parameters():
            p.requires_grad_(False)
        for block in model.model.layers:
            for parent in list(block.modules()):
                for name in set(LINEAR) & set(dict(parent.named_children())):
                    setattr(parent, name, LoraLinear(getattr(parent, name)))
        found = "written out"
    else:
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LINEAR), task_type="CAUSAL_LM")
        peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        found = "PEFT"
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
            if "lora_B" in name:  # zero at the start of a run only: products of zeros are faster
                nn.init.normal_(p, std=0.01)
    return found


class LoraLinear(nn.Module):
    """base(x) + alpha / rank * B A x: what PEFT's layer computes without dropout."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(RANK, base.in_features, device=base.weight.device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, RANK, device=base.weight.device))
        self.enabled = True
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def enable_adapters(self, enabled: bool) -> None:
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return self.base(x)
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * (ALPHA / RANK)


def head_and_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), weight)
    return F.cross_entropy(logits.float(), labels.reshape(-1))


class Loss(nn.Module):
    """The loss of a model. Its params outside of layers, such as the LM head's, are gathered for all of it."""

    def __init__(self, model: Any, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        return self.function(hidden, self.model.lm_head.weight, labels)


def token_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of every label, fp32 [documents, tokens]."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), weight)
    return -F.cross_entropy(logits.float(), labels.reshape(-1), reduction="none").view(labels.shape)


class DpoLoss(Loss):
    """DPO of rows that are pairs: the chosen document, then the rejected one, of equal length."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        halves = [x.reshape(2 * len(x), -1) for x in (inputs, labels)]
        margin = self._margin(*halves)
        with torch.no_grad(), without_adapters(self.model):
            reference = self._margin(*halves)
        return -F.logsigmoid(BETA * (margin - reference)).mean()

    def _margin(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """By how much the chosen document of each pair is more probable than the rejected one."""
        chosen, rejected = super().forward(inputs, labels).sum(1).view(-1, 2).unbind(1)
        return chosen - rejected


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def divide(loss: Loss, zero_level: int) -> None:
    """Divide weights, gradients and moments among the processes, layer by layer."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in loss.model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=zero_level == 3)
    fully_shard(loss, mp_policy=policy, reshard_after_forward=False)


@dataclass
class Step:
    """An optimizer step.

    summed: whether gradients are summed over processes before the optimizer, because backward passes do not.
    inputs, labels: [DISTINCT_BATCHES, batch, seq_len]. graph: a captured micro-step, which reads `place`.
    """

    loss_of: Loss
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor
    accumulate: int
    params: list[Tensor] = field(default_factory=list)
    summed: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    place: tuple[Tensor, Tensor] | None = None
    graph_loss: Tensor | None = None
    loss: Tensor | float = 0.0

    @classmethod
    def of(cls, model: Any, arguments: argparse.Namespace, compiled: bool) -> Step:
        device = next(model.parameters()).device
        shape = (DISTINCT_BATCHES, arguments.batch, arguments.seq_len + 1)
        tokens = torch.randint(0, model.config.vocab_size, shape, device=device)
        if compiled:
            torch._dynamo.config.cache_size_limit = 64
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        kind, function = (DpoLoss, token_log_probs) if arguments.dpo else (Loss, head_and_loss)
        loss_of = kind(model, torch.compile(function, dynamic=False) if compiled else function)
        several = arguments.gpus > 1
        if several and not arguments.lora:
            divide(loss_of, arguments.zero_level)
        params = [p for p in model.parameters() if p.requires_grad]
        return cls(
            loss_of=loss_of,
            summed=several and arguments.lora,
            optimizer=torch.optim.AdamW(params, lr=1e-5, betas=(0.9, 0.999), weight_decay=0.1, fused=True),
            inputs=tokens[:, :, :-1].contiguous(),
            labels=tokens[:, :, 1:].contiguous(),
            accumulate=arguments.accumulate,
            params=params,
        )

    def run(self) -> None:
        """Enqueue the step."""
        loss: Tensor | float = 0.0
        for i in range(self.accumulate):
            loss = loss + self._micro_step(self.inputs[i % DISTINCT_BATCHES], self.labels[i % DISTINCT_BATCHES])
        if self.summed:
            average_gradients(self.params)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.graph is None)
        self.loss = loss

    def capture(self) -> None:
        """Capture a micro-step, which writes into gradients that stay where they are from now on."""
        torch.cuda.empty_cache()
        self.place = self.inputs[0].clone(), self.labels[0].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._forward_backward(*self.place)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.graph_loss = self._forward_backward(*self.place)
        self.optimizer.zero_grad(set_to_none=False)
        self.graph = graph

    def _micro_step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        if self.graph is None or self.place is None or self.graph_loss is None:
            return self._forward_backward(inputs, labels)
        self.place[0].copy_(inputs)
        self.place[1].copy_(labels)
        self.graph.replay()
        return self.graph_loss.clone()

    def _forward_backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss_of(inputs, labels) / self.accumulate
        loss.backward()
        return loss.detach()


def average_gradients(params: Sequence[Tensor]) -> None:
    """Average gradients over the processes, in one sum."""
    gradients = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    torch._foreach_copy_(
        gradients,
        [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)],
    )


def awaited(step: Callable[[], None]) -> Callable[[int], None]:
    """Return `step` as `timed` calls it."""

    def run(number: int) -> None:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def versions(with_peft: bool) -> str:
    import transformers

    found = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if with_peft:
        import peft

        found += f", peft {peft.__version__}"
    return found


if __name__ == "__main__":
    main()
