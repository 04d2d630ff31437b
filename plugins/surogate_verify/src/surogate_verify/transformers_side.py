"""The other side of a comparison: the model of transformers, with the adapter of PEFT, from the same files.

In float64 it is a whole model in float64, even where its code asks for float32 by name.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from surogate.config.rope_scaling import whole_scaling
from surogate.hub.config_json import read_config, text_part
from surogate.outputs.check_process import quiet
from surogate.runs.published_form import unquantized
from surogate.runs.saved_values import adapter_params
from surogate_core.batch import NO_LABEL
from surogate_core.errors import ConfigError

from .observed import EMBEDDING, LOGIT_POSITIONS, LOGITS, Observed, block_name
from .programs import Subject
from .rows import ComparedRows

STORED: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def observe(
    subject: Subject,
    rows: ComparedRows,
    scratch: Path,
    compute: torch.dtype,
    ours: Observed,
    error: float = 0.0,
    draw: int = 0,
) -> Observed:
    """Run each document forward and backward in the dtype `compute` (float64, float32 or bfloat16), with our choices.

    For float64 and float32 the weights are first rounded to the dtype that the run stores, so that only the arithmetic
    differs. Dropout is off. `scratch` holds the weights that our side wrote. `error`: see RoundedProducts. `draw`: 0
    for the computation as it is; another number for one that is as exact and rounds otherwise.
    """
    device = "cpu" if subject.plan.target.device.sm is None else "cuda:0"
    with quiet():
        model = _load(subject, scratch, compute if compute == torch.bfloat16 else torch.float32).to(device)
        if compute != torch.bfloat16:
            _convert(model, STORED[subject.plan.inputs.precision.model], _other_dtypes(subject))
        wrapped, parameters = _adapted(subject, model, scratch)
        if compute != torch.bfloat16:
            _convert(wrapped, compute)
        wrapped = wrapped.to(device).eval()
    _count_padding(model)
    observed, inputs = Observed(loss=0.0), subject.plan.inputs
    with ExitStack() as stack:
        seen = _watch(model, stack)
        if compute == torch.float64:
            stack.enter_context(KeepFloat64())
        if error:
            stack.enter_context(RoundedProducts(error, device))
        if draw and compute == torch.bfloat16:
            stack.enter_context(OtherRounding(device, draw))
        if draw and compute == torch.float32:
            stack.enter_context(OtherOrder(device, draw))
        same = stack.enter_context(SameChoices(ours.choices, ours.widths)) if ours.choices else None
        for group in rows.groups:
            outputs = []
            for start, stop in group:
                tokens = torch.from_numpy(rows.batch.tokens[start:stop]).long().to(device)
                with same.document(stop - start) if same else nullcontext():
                    outputs.append(wrapped(input_ids=tokens[None], use_cache=False).logits.flatten(0, -2))
            logits = torch.cat(outputs).float()
            if inputs.loss.reference_loss:
                loss = inputs.loss.reference_loss(logits, inputs.loss_options) / rows.batch.n_groups
            else:
                targets = torch.from_numpy(rows.batch.targets[start:stop]).long().to(device)
                loss = F.cross_entropy(logits, targets, ignore_index=NO_LABEL, reduction="sum") / rows.batch.n_valid
            loss.backward()
            observed.loss += float(loss.detach())
            rest = LOGIT_POSITIONS - sum(len(part) for part in seen[LOGITS])
            seen[LOGITS].append(logits[:rest].detach().cpu())
    if same:
        of_documents = (same.own, same.taken, same.values)
        observed.choices, observed.taken, observed.values = (list(map(torch.cat, found)) for found in of_documents)
    observed.states = {name: torch.cat(parts) for name, parts in seen.items() if parts}
    observed.buffers = frozenset(name for name, _ in model.named_buffers())
    observed.gradients = _gradients(subject, wrapped, parameters, scratch)
    del model, wrapped, parameters
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return observed


def _load(subject: Subject, scratch: Path, dtype: torch.dtype) -> Any:
    """Load the weights of the checkpoint, or those that our side drew, with the config of the model's files.

    What the program chooses by the length of its rows is chosen so here too (`ModelDef.row_choice`).

    The run's `rope_scaling` is set as a user of transformers sets it, so that a wrongly rewritten config.json shows.
    """
    import transformers
    from transformers import __version__ as version

    definition, original = subject.plan.inputs.model, unquantized(read_config(subject.run.model_dir))
    choice = definition.row_choice(subject.run.model_config, subject.plan.inputs.seq_len)
    model_dir = scratch / "model" if (scratch / "model").exists() else subject.run.model_dir
    config = scratch / "config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(
        json.dumps(definition.saved(choice.config if choice else original)), encoding="utf-8"
    )
    try:
        kind, given = getattr(transformers, definition.loaded_by), transformers.AutoConfig.from_pretrained(config)
        if scaling := subject.run.config.rope_scaling:
            text = whole_scaling(text_part(original), scaling, subject.run.config.max_model_len)
            _rescale(given.get_text_config(), text)
        return kind.from_pretrained(
            model_dir, config=given, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
    except Exception as error:  # config, files and version can fail anywhere in transformers
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{model_dir}: transformers {version} does not load this model: {reason}") from error


def _rescale(config: Any, scaling: Mapping[str, Any]) -> None:
    """Give a config of transformers another RoPE scaling, of the layers without a window if each type has its own."""
    ropes = config.rope_parameters
    scaled = ropes["full_attention"] if any(isinstance(entry, dict) for entry in ropes.values()) else ropes
    unscaled = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta", "mrope_section", "mrope_interleaved")
    kept = {key: scaled[key] for key in unscaled if key in scaled}
    scaled.clear()
    scaled.update({**kept, **scaling})
    if (key := "original_max_position_embeddings") in scaling and hasattr(config, key):
        setattr(config, key, scaling[key])
    config.standardize_rope_params()


def _convert(model: Any, dtype: torch.dtype, but: Collection[str] = ()) -> None:
    """Convert parameters, not buffers: the frequencies of RoPE and the factor of Gemma's embedding stay in fp32."""
    for name, parameter in model.named_parameters():
        if name not in but:
            parameter.data = parameter.data.to(dtype)


def _other_dtypes(subject: Subject) -> set[str]:
    """Return the tensors whose params have another dtype than the run's model. Those in a format have no param."""
    assembly, dtype = subject.plan.assembly, subject.plan.inputs.precision.model
    others = {name for name, param in assembly.params.items() if param.dtype != dtype}
    return {tensor.name for weight in assembly.weights if weight.param in others for tensor in weight.tensors}


def _count_padding(model: Any) -> None:
    """Make torch's embeddings compute the gradient of the padding token's row.

    transformers passes `pad_token_id` as `padding_idx` to torch.nn.Embedding, which leaves out the gradient of that
    row and does not change the forward pass. Surogate trains the row wherever the token occurs in a document, because
    many tokenizers pad with the token that also ends a text.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None


def _adapted(subject: Subject, model: Any, scratch: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the model to call, and the trained parameters by name. Those of towers are not trained."""
    if subject.run.adapter is None:
        frozen = _frozen(subject)
        every = model.named_parameters()
        return model, {name: p for name, p in every if not any(fnmatchcase(name, pattern) for pattern in frozen)}
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"an adapter is compared with that of PEFT: {error}. Install it: pip install peft") from None
    wrapped = peft.PeftModel.from_pretrained(model, scratch / "adapter", is_trainable=True)
    return wrapped, {name: p for name, p in wrapped.named_parameters() if p.requires_grad}


def _gradients(subject: Subject, wrapped: Any, parameters: dict[str, Any], scratch: Path) -> dict[str, Tensor]:
    """Return gradients by the names that our side uses.

    Those of an adapter are saved and loaded in its file format, which translates the names, as are those of a model
    whose checkpoints have other names: experts are one tensor in memory. What the run leaves frozen has none.
    """
    found, assembly = subject.run.adapter, subject.plan.assembly
    names = {tensor.name for m in assembly.weights for tensor in m.tensors}
    if found is None and parameters.keys() <= names:
        return {name: p.grad.float().cpu() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.data = parameter.grad
    folder = scratch / "gradients"
    with quiet():
        wrapped.save_pretrained(folder, **({"save_embedding_layers": False} if found else {}))
    if found is None:
        files = (load_file(path) for path in sorted(folder.glob("*.safetensors")))
        without = [*dict(wrapped.named_buffers()), *_frozen(subject)]
        every = ((name, tensor) for file in files for name, tensor in file.items())
        return {
            name: tensor.float() for name, tensor in every if not any(fnmatchcase(name, other) for other in without)
        }
    adapter, options = found
    frozen = {param.name for param in adapter_params(assembly) if param not in assembly.trainable}
    return {name: tensor.float() for name, tensor in adapter.load(folder, options).items() if name not in frozen}


def _frozen(subject: Subject) -> list[str]:
    """Return patterns of the tensors that no run trains, which transformers may have as parameters: those of towers
    too."""
    never = (tensor.name for m in subject.plan.assembly.weights if not m.trained for tensor in m.tensors)
    return [*subject.plan.inputs.model.kept_tensors(subject.plan.inputs.dims), *never]


def _watch(model: Any, stack: ExitStack) -> dict[str, list[Tensor]]:
    """Return a list for the embedding, each block and the logits.

    While `stack` is open, hooks append what the first block reads, with the factor of the embedding that some models
    have, and what the blocks return.
    """
    blocks = list(getattr(model.get_decoder(), "layers", None) or ())
    seen: dict[str, list[Tensor]] = {name: [] for name in (EMBEDDING, *map(block_name, range(len(blocks))), LOGITS)}

    def keep(name: str, state: Any) -> None:
        state = state[0] if isinstance(state, tuple) else state
        seen[name].append(state.detach().flatten(0, -2).float().cpu())

    def after(n: int) -> Any:
        return lambda module, args, output: keep(block_name(n), output)

    def before(module: Any, args: Any, kwargs: Any) -> None:
        keep(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    for n, block in enumerate(blocks):
        if n == 0:
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(after(n)).remove)
    return seen


class SameChoices(TorchFunctionMode):
    """Makes a model choose what our side chose where it takes the largest values, as routers do, by `topk`.

    Two values that are closer than their rounding may be chosen either way, and the results then differ by all that
    depends on the choice. So the choices are compared by what they lose, and the results for equal choices.

    A router may first choose groups of experts, by a `topk` of a value for each. It then takes the groups of our
    experts, and where these are fewer, its best others. Two groups that are alike may have experts that are not: by
    the values of experts alone, the loss of such a choice would be no rounding.

    Experts are read out of their common tensor in one op, whose gradient is written once.
    """

    def __init__(self, choices: Sequence[Tensor], widths: Sequence[int]) -> None:
        """`widths`: of how many values each choice is.

        For each choice that the model makes in a document, of groups too: own, what it would have chosen; taken, what
        it goes on with; values, of which its own are the largest.
        """
        super().__init__()
        self._widths = widths
        self._choices, self._next, self._stop, self._size = choices, 0, 0, 0
        self._matrices: dict[Tensor, Sequence[Tensor]] = {}
        self.own: list[list[Tensor]] = []
        self.taken: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []
        self._made = 0

    @contextmanager
    def document(self, size: int) -> Iterator[None]:
        """Run the next document, of `size` tokens. Raises ConfigError unless it uses all choices."""
        self._next, self._made, self._size, self._stop = 0, 0, size, self._stop + size
        self._matrices.clear()
        yield
        if self._next != len(self._choices):
            raise ConfigError(
                f"verify compares models with routers for equal choices, which it gives to calls of topk: transformers "
                f"has {self._next} for the {len(self._choices)} routers of the model. Use a version whose routers call "
                "it."
            )

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        is_expert = func is Tensor.__getitem__ and isinstance(args[0], torch.nn.Parameter) and args[0].ndim == 3
        if is_expert and isinstance(args[1], Tensor) and not args[1].ndim:
            # The gradient of one matrix, by itself, would be a tensor of all experts.
            if args[0] not in self._matrices:
                self._matrices[args[0]] = args[0].unbind()
            return self._matrices[args[0]][int(args[1])]
        found = func(*args, **kwargs or {})
        if func not in (torch.topk, Tensor.topk) or self._next == len(self._choices):
            return found
        values, width = args[0], self._widths[self._next]
        ours = self._choices[self._next][self._stop - self._size : self._stop].to(found.indices.device).long()
        if values.ndim != 2 or len(values) != len(ours):
            return found
        if values.shape[-1] == width and found.indices.shape == ours.shape:
            self._next += 1
        elif 1 < values.shape[-1] < width and not width % values.shape[-1]:
            ours = _with_groups_of(ours // (width // values.shape[-1]), values.detach(), found.indices.shape[-1])
        else:
            return found
        for kept, part in ((self.own, found.indices), (self.taken, ours), (self.values, values.detach())):
            kept.extend([] for _ in range(self._made + 1 - len(kept)))
            kept[self._made].append(part.cpu())
        self._made += 1
        return torch.return_types.topk((values.gather(-1, ours), ours))


def _with_groups_of(groups: Tensor, values: Tensor, k: int) -> Tensor:
    """Return k groups of each token: those in `groups`, and the others with the largest values.

    No k groups have what `groups` has if these are more. That is no matter of rounding: those with the lowest values.
    """
    ours = torch.zeros_like(values).scatter(-1, groups, 1.0)
    possible = ours.sum(-1, keepdim=True) <= k
    chosen = torch.where(possible, values.masked_fill(ours > 0, inf), -values).topk(k).indices
    return chosen.gather(-1, values.gather(-1, chosen).argsort(-1, descending=True))


class RoundedProducts(TorchFunctionMode):
    """Rounds both operands of every product with a weight, forward and backward, so that the product is off by `error`.

    Rounding is at random, of each element in proportion to itself, of a weight once. So results are off as far as such
    errors get in this model: norms behind products scale them up, for one.
    """

    def __init__(self, error: float, device: str) -> None:
        super().__init__()
        self._largest = error * 1.5**0.5  # of uniform errors: rms error / sqrt(2) in each operand
        self._random = torch.Generator(device).manual_seed(0)
        self._off_by: dict[Tensor, Tensor] = {}

    def _off(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).uniform_(-self._largest, self._largest, generator=self._random)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **kwargs or {})
        x, weight, bias = (*args, None)[:3]
        if weight not in self._off_by:
            self._off_by[weight] = self._off(weight.detach())
        product = func(x + self._off(x.detach()), weight + self._off_by[weight])
        if product.requires_grad:
            product.register_hook(lambda grad: grad + self._off(grad))
        return product if bias is None else product + bias


class OtherRounding(TorchFunctionMode):
    """Rounds results of products with weights in bf16 another time, forward and backward: one number of twelve goes to
    its neighbour, up or down. That adds the variance of a rounding to nearest, a twelfth of a unit squared.

    Sums are fp32 and are rounded to bf16, so another order of them, or operands that are off by less than half a unit,
    would give the same numbers. Products in fp32, such as those of PEFT's adapters, are left as they are.
    """

    SHARE: Final = 1 / 12

    def __init__(self, device: str, seed: int) -> None:
        super().__init__()
        self._random = torch.Generator(device).manual_seed(seed)

    def _off(self, x: Tensor) -> Tensor:
        """Return what is to be added to x in bf16: 0, or the difference to a neighbour, which is exact."""
        drawn = torch.empty(x.shape, device=x.device).uniform_(generator=self._random)
        step = (drawn < self.SHARE).to(torch.int16) - 2 * (drawn < self.SHARE / 2).to(torch.int16)
        bits = x.contiguous().view(torch.int16)
        return torch.where((bits & 0x7FFF) == 0, 0, (bits + step).view(torch.bfloat16) - x)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **kwargs or {})
        product = func(*args, **kwargs or {})
        if product.dtype != torch.bfloat16:
            return product
        product = product + self._off(product.detach())
        if product.requires_grad:
            product.register_hook(lambda grad: grad + self._off(grad))
        return product


class OtherOrder(TorchFunctionMode):
    """Computes products with weights in another order of their sums, drawn for each: over the inner dimension in the
    forward pass, over rows and columns in the backward pass. Nothing else changes."""

    def __init__(self, device: str, seed: int) -> None:
        super().__init__()
        self._random, self._device = torch.Generator(device).manual_seed(seed), device

    def _order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._random, device=self._device)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **kwargs or {})
        x, weight, bias = (*args, None)[:3]
        rows = x.flatten(0, -2)
        inner, row, column = map(self._order, (weight.shape[1], rows.shape[0], weight.shape[0]))
        product = func(rows[row][:, inner], weight[column][:, inner])
        product = product[row.argsort()][:, column.argsort()].view(*x.shape[:-1], -1)
        return product if bias is None else product + bias


class KeepFloat64(TorchFunctionMode):
    """Keeps a float64 tensor in float64 where code would cast it to float32.

    The norms and the softmax of transformers compute in float32 whatever the dtype of the model ("x.to(torch.float32)",
    "softmax(x, dtype=torch.float32)"), so a model that is only moved to float64 is no more exact than these. Only casts
    of float64 tensors change: what starts in float32, such as the angles of RoPE, stays in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [_wide(value) for value in args]
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
