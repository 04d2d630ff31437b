"""Their side: transformers' model, and PEFT's adapter on it, from the same files."""

from __future__ import annotations

import gc
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.loader import NO_LABEL
from ..errors import ConfigError
from .float64 import KeepFloat64
from .observed import EMBEDDING, LOGIT_POSITIONS, LOGITS, Observed, block_name
from .subject import Subject
from .tokens import Chosen

STORED: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def observe(subject: Subject, chosen: Chosen, scratch: Path, compute: torch.dtype) -> Observed:
    """Forward and backward of every document on its own, computed in `compute`: float64, float32 or bfloat16.

    Above bfloat16 the weights are first rounded to the dtype that the run stores, so that only the arithmetic differs.
    Dropout is off. `scratch`: where our side has written what is not in the user's files.
    """
    device = "cpu" if subject.plan.target.device.sm is None else "cuda:0"
    stored = compute if compute == torch.bfloat16 else STORED[subject.plan.inputs.precision.model]
    with _quiet():
        model = _load(subject, scratch, stored)
        wrapped, parameters = _adapted(subject, model, scratch)
        wrapped = _in_dtype(wrapped, compute).to(device).eval()
    _count_padding(model)
    observed = Observed()
    with ExitStack() as stack:
        seen = _watch(model, stack)
        if compute == torch.float64:
            stack.enter_context(KeepFloat64())
        for start, stop in chosen.documents:
            tokens = torch.from_numpy(chosen.batch.tokens[start:stop]).long().to(device)
            targets = torch.from_numpy(chosen.batch.targets[start:stop]).long().to(device)
            logits = wrapped(input_ids=tokens[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits.float(), targets, ignore_index=NO_LABEL, reduction="sum")
            (loss / chosen.batch.n_valid).backward()
            total = observed.loss if seen[LOGITS] else 0.0
            observed.loss = total + float(loss.detach()) / chosen.batch.n_valid
            rest = LOGIT_POSITIONS - sum(len(part) for part in seen[LOGITS])
            seen[LOGITS].append(logits[:rest].detach().float().cpu())
    observed.states = {name: torch.cat(parts) for name, parts in seen.items()}
    observed.gradients = _gradients(subject, wrapped, parameters, scratch)
    del model, wrapped, parameters
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return observed


def _load(subject: Subject, scratch: Path, dtype: torch.dtype) -> Any:
    """The weights of the checkpoint, or those that our side has drawn, under the config that the run would save."""
    from transformers import AutoModelForCausalLM
    from transformers import __version__ as version

    model_dir = scratch / "model" if (scratch / "model").exists() else subject.run.model_dir
    config = scratch / "config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(subject.run.model_config), encoding="utf-8")
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_dir, config=str(config), dtype=dtype, attn_implementation="eager"
        ).eval()
    except Exception as error:  # a config, a file or a version can fail in any of its layers
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{model_dir}: transformers {version} does not load this model: {told}") from error


def _in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in `dtype`; in bfloat16 they have been loaded so, and an adapter stays in the fp32 that PEFT gives it.

    Buffers stay as they are: `model.to(torch.bfloat16)` would round the frequencies of RoPE too, which no training
    with transformers does, and would make its error look large.
    """
    if dtype != torch.bfloat16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _count_padding(model: Any) -> None:
    """Have torch's embeddings give the padding token's row its gradient.

    transformers passes `pad_token_id` as `padding_idx` to torch.nn.Embedding, which then leaves out the gradient of
    that row; the forward pass is the same. Surogate trains the row wherever the token stands in a document, because
    many tokenizers pad with the token that also ends a text.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None


def _adapted(subject: Subject, model: Any, scratch: Path) -> tuple[Any, dict[str, Tensor]]:
    """(what is called, the parameters that are trained, by their names)."""
    if subject.run.adapter is None:
        return model, dict(model.named_parameters())
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"an adapter is verified beside PEFT's: {error}. Install it: pip install peft") from None
    wrapped = peft.PeftModel.from_pretrained(model, scratch / "adapter", is_trainable=True)
    return wrapped, {name: p for name, p in wrapped.named_parameters() if p.requires_grad}


def _gradients(subject: Subject, wrapped: Any, parameters: dict[str, Any], scratch: Path) -> dict[str, Tensor]:
    """Under the names that our side uses. An adapter's go through the files of its format, which names them."""
    found = subject.run.adapter
    if found is None:
        return {name: p.grad.float().cpu() for name, p in parameters.items() if p.grad is not None}
    adapter, options = found
    for parameter in parameters.values():
        parameter.data = parameter.grad
    folder = scratch / "adapter-gradients"
    with _quiet():
        wrapped.save_pretrained(folder, save_embedding_layers=False)
    return {name: tensor.float() for name, tensor in adapter.load(folder, options).items()}


def _watch(model: Any, stack: ExitStack) -> dict[str, list[Tensor]]:
    """Lists that fill with what the embedding and each block return, while `stack` is open; and one for the logits."""
    blocks = getattr(model.base_model, "layers", None)
    if blocks is None:
        raise ConfigError(f"transformers' {type(model).__name__} has no list of layers to compare with.")
    modules = {EMBEDDING: model.get_input_embeddings()}
    modules |= {block_name(n): block for n, block in enumerate(blocks)}
    seen: dict[str, list[Tensor]] = {name: [] for name in (*modules, LOGITS)}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            seen[name].append(state.detach().flatten(0, -2).float().cpu())

        return hook

    for name, module in modules.items():
        stack.callback(module.register_forward_hook(keep(name)).remove)
    return seen


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and advice: what is told is told by the caller."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
