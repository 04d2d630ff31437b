"""Core's keys of a run's YAML file: types, defaults, ranges, meaning. One class a theme; `TrainConfig` is all of them.

Keys of plugins are not here: each plugin's `options` model declares its own. Keys whose feature is not built and
keys that nothing reads are in `keys.py`.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..api import Deterministic, PrecisionRequest
from .errors import fold
from .rope_scaling import parse_rope_scaling

# ------------------------------------------------------------------------------------------------------------ values

_LARGEST_COUNT = 2**31 - 1
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_DTYPES = {"float32": "fp32", "torch.float32": "fp32", "bfloat16": "bf16", "torch.bfloat16": "bf16"}


def _whole_number(value: Any) -> int:
    """8, "8", 8.0 and "1e3" are whole numbers; true and 1.5 are not."""
    if isinstance(value, str) and len(value) <= 40:
        number = _as_float(value)
        exact = value.strip().removeprefix("-").removeprefix("+")
        value = int(value) if exact.isascii() and exact.isdigit() else number
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    number = _as_float(value)
    if number is None:
        raise ValueError("must be a number")
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def _as_float(value: int | float | str) -> float | None:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    raise ValueError("must be true or false")


def _flag_or_auto(value: Any) -> str:
    """auto, true or false, as words."""
    if _word(value) == "auto":
        return "auto"
    try:
        return "true" if _flag(value) else "false"
    except ValueError:
        raise ValueError("must be auto, true or false") from None


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):  # run_name: 7
        value = str(value) if abs(value) < 10**18 else None
    if not isinstance(value, str):
        raise ValueError("must be text; put it in quotes")
    if not value.strip():
        raise ValueError("must not be empty")
    if len(value) > 4096:
        raise ValueError("must have at most 4096 characters")
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in value):
        raise ValueError("must not hold control characters or line breaks")
    return value


def _place(value: Any) -> str:
    """The text of a path with `~` as the shell has it: YAML and `--set` hand it over as it is."""
    return os.path.expanduser(_text(value))


def _resume(value: Any) -> bool | int | str:
    """true or false, a step, `last-good`, or a path."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    if isinstance(value, str) and fold(value) == fold("last-good"):
        return "last-good"
    if isinstance(value, str) and not value.strip().isdecimal():
        return _place(value)
    try:
        step = _whole_number(value)
    except ValueError:
        raise ValueError("must be true, false, a step, the folder of a checkpoint, or last-good") from None
    if not 1 <= step <= _LARGEST_COUNT:
        raise ValueError(f"a step is at least 1 and at most {_LARGEST_COUNT}")
    return step


def _word(value: Any) -> Any:
    return fold(value) if isinstance(value, str) else value


def _dtype(value: Any) -> Any:
    folded = value.strip().lower() if isinstance(value, str) else value
    return _DTYPES.get(folded, folded) if isinstance(folded, str) else folded


def _dtype_or_auto(value: Any) -> Any:
    folded = _dtype(value)
    return None if folded == "auto" else folded


def _count_or_auto(smallest: int) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if _word(value) == "auto":
            return "auto"
        try:
            number = _whole_number(value)
        except ValueError:
            raise ValueError("must be auto or a whole number") from None
        if not smallest <= number <= _LARGEST_COUNT:
            raise ValueError(f"must be auto or a whole number of at least {smallest}")
        return number

    return parse


def _names(value: Any) -> tuple[str, ...]:
    """A name or a list of names; `none` is the empty list. Each once, in order."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError("must be a name or a list of names")
    return tuple(dict.fromkeys(entry for entry in entries if fold(entry) not in ("none", "")))


Int = Annotated[int, BeforeValidator(_whole_number), Field(le=_LARGEST_COUNT)]
Seed = Annotated[int, BeforeValidator(_whole_number), Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
Place = Annotated[str, BeforeValidator(_place)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
StorageDtype = Annotated[Literal["fp32", "bf16"], BeforeValidator(_dtype)]
MatmulDtype = Annotated[Literal["fp32", "bf16", "e4m3"], BeforeValidator(_dtype)]
GradientDtype = Annotated[Literal["fp32", "bf16", "e5m2"], BeforeValidator(_dtype)]

# -------------------------------------------------------------------------------------------------------------- keys


class Keys(BaseModel):
    # Validators are built on first use: the themes need none of their own, and a start of the CLI often none at all.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)


class DatasetEntry(Keys):
    """One entry of `datasets:` or `validation_datasets:`. Keys of the dataset's type stand beside these."""

    path: Text = Field(description="A file, a folder of files, or a dataset of the Hugging Face hub.")
    type: Text = Field("auto", description="Dataset type; auto: the first type that fits the columns.")
    subset: Text | None = Field(None, description="Subset (configuration) of a hub dataset.")
    split: Text = Field("train", description="Split of a hub dataset.")
    samples: Annotated[Int, Field(ge=1)] | None = Field(None, description="Use the first so many rows; null: all.")
    weight: Annotated[Number, Field(gt=0, le=1000)] | None = Field(
        None, description="How often an epoch trains each document: 2 is twice, 0.5 a random half; null: once."
    )
    options: dict[str, Any] = Field({}, description="The keys of the type, validated by it.", exclude=True)


class RunKeys(Keys):
    """Run and files"""

    run_name: Text | None = Field(None, description="Name of the run in logs; null: the last part of `output_dir`.")
    output_dir: Place = Field("output", description="Folder of the trained model, metrics and the resolved config.")
    checkpoint_dir: Place | None = Field(None, description="Folder of the `step_*` checkpoints; null: `output_dir`.")
    overwrite_output_dir: Flag = Field(
        False,
        description="Begin a new run in folders that hold an earlier run or another model: what is there is renamed to "
        "`*.set_aside`, nothing is deleted. With false the run is refused.",
    )
    save_steps: Int = Field(50, ge=0, description="Save a checkpoint every N steps; 0: only at the end.")
    save_total_limit: Int = Field(5, ge=0, description="Keep the newest so many checkpoints; 0: all.")
    save_in_background: Flag = Field(
        True,
        description="Write the checkpoints of `save_steps` from copies in host memory while training goes on. Where "
        "these do not fit, or with false, training waits.",
    )
    resume_from_checkpoint: Annotated[bool | int | str, BeforeValidator(_resume)] = Field(
        False,
        description="Go on from a checkpoint: true (the newest in `checkpoint_dir`; without any, a fresh start), "
        "a step, a checkpoint's folder, or last-good (the newest one that is not damaged).",
    )
    verify_outputs: Flag = Field(
        True, description="Load every output once, in transformers or PEFT, before the run says that it is done."
    )
    push_to_hub: Flag = Field(
        False, description="At the end upload the model, or the adapter, with its card to the Hugging Face hub."
    )
    hub_model_id: Text | None = Field(
        None, description="Repository to push to, `name` or `owner/name`; null: `run_name`, of whoever is logged in."
    )
    hub_private: Flag | None = Field(
        None, description="Whether a repository that is made is private; null: the account's default."
    )
    log_file: Place | None = Field(None, description="File of the metrics; null: `metrics.jsonl` in `output_dir`.")
    report_to: Names = Field((), description="Loggers to report to besides console and metrics file: a name or a list.")
    logging_steps: Int = Field(1, ge=1, description="Report every N steps.")
    log_gpu_util: Int = Field(
        100,
        ge=0,
        description="Record load, memory, power, temperature and clocks of the GPUs every N steps; 0: never.",
    )


class ModelKeys(Keys):
    """Model"""

    model: Text = Field(description="Hugging Face id, or folder with `config.json`, of the model.")
    from_scratch: Flag = Field(False, description="Start from random weights; only the model's `config.json` is read.")
    init_projections_to_zero: Flag = Field(
        False, description="With `from_scratch`: blocks start as the identity, output projections at zero."
    )
    sequence_len: Int = Field(1024, ge=2, description="Tokens a row.")
    max_model_len: Annotated[Int, Field(ge=2)] | None = Field(
        None, description="Longest sequence the model may see; null: what its configuration allows."
    )
    rope_scaling: Annotated[dict[str, Any] | None, BeforeValidator(parse_rope_scaling)] = Field(
        None,
        description="RoPE scaling in place of that in `config.json`, saved with the weights: linear, dynamic, yarn or "
        "llama3, or a mapping of `rope_type` and its settings. Without a `factor`: `max_model_len` / the model's own.",
    )
    adapter: Text | None = Field(
        None, description="Adapter to train instead of all weights, from an installed plugin; null or none: none."
    )
    lora: Flag = Field(
        False, description="Train LoRA adapters: the same as `adapter: lora`. Default: true for `sft`, false for `pt`."
    )
    adapter_path: Text | None = Field(
        None, description="Folder of a saved adapter to go on training, of the same rank, alpha, targets and modules."
    )
    merge_adapter: Flag = Field(False, description="At the end also write base + adapter, as `output_dir`/merged.")


class DataKeys(Keys):
    """Data"""

    datasets: tuple[DatasetEntry, ...] = Field((), description="What to train on: a list of entries (below).")
    validation_datasets: tuple[DatasetEntry, ...] | None = Field(
        None, description="What to evaluate on; null: a part split from `datasets`."
    )
    validation_split_ratio: Number = Field(
        0.1, ge=0, lt=1, description="Part of `datasets` kept for evaluation; 0 when `validation_datasets` is given."
    )
    loss_scale: Annotated[Literal["default", "last_round", "all"], BeforeValidator(_word)] = Field(
        "default", description="What chat data trains, where the entry does not say: as the key of the type below."
    )
    truncation_strategy: Annotated[Literal["delete", "left", "right", "split"], BeforeValidator(_word)] | None = Field(
        None,
        description="Documents longer than a row: delete and count; cut off the left or the right end; split. "
        "null: split text, delete conversations.",
    )
    sample_packing: Flag = Field(True, description="Pack several documents into a row; none attends to another.")
    train_seed: Seed = Field(1234, description="Seed of initialisation, data order and stochastic rounding.")
    eval_seed: Seed = Field(1234, description="Seed of the evaluation split.")
    dataloader_num_workers: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto(0))] = Field(
        "auto", description="Threads that tokenize; auto: one a core; 0: none besides the main one."
    )


class LoopKeys(Keys):
    """Training loop"""

    num_epochs: Int = Field(3, ge=1, description="Passes over the data; used when `max_steps` is not positive.")
    max_steps: Int = Field(-1, ge=-1, description="Optimizer steps; -1 or 0: by `num_epochs`.")
    per_device_train_batch_size: Int = Field(2, ge=1, description="Rows a micro-step, in evaluation too.")
    gradient_accumulation_steps: Int = Field(4, ge=1, le=65536, description="Micro-steps an optimizer step.")
    eval_steps: Int = Field(
        100,
        ge=0,
        description="Evaluate every N steps; 0: not between steps. The whole validation set, if there is one, is "
        "always evaluated after the last step.",
    )
    max_nonfinite_steps: Int = Field(
        10, ge=0, description="Stop after N steps in a row without a finite loss and gradient; 0: at once."
    )
    check_finite: Flag = Field(
        False,
        description="Run op by op and stop at the first op that writes a number which is not finite, naming it "
        "(`--check-finite`). Slow.",
    )
    deterministic: Annotated[Deterministic, BeforeValidator(_flag_or_auto)] = Field(
        "auto",
        description="The same bits from run to run on a GPU. auto: where affordable, else the run says what is not; "
        "products keep the algorithm that was fastest when this machine first ran them. true: always; a run that "
        "cannot is refused, and products take the library's first choice, untimed. false: whatever is fastest.",
    )


class OptimizerKeys(Keys):
    """Optimizer and schedule"""

    optimizer: Text = Field("adamw", description="Optimizer, from an installed plugin.")
    learning_rate: Number = Field(2e-4, ge=0, le=1e38, description="Peak learning rate.")
    lr_scheduler_type: Annotated[Literal["linear", "cosine", "wsd", "constant"], BeforeValidator(_word)] = Field(
        "linear", description="Decay after the warmup. wsd: flat, then decays over the last part."
    )
    warmup_ratio: Number = Field(0.0, ge=0, le=1, description="Part of the steps that warm up linearly from 0.")
    warmup_steps: Int = Field(0, ge=0, description="Steps of warmup; overrides `warmup_ratio` when positive.")
    cooldown_steps: Int = Field(0, ge=0, description="Steps at the end that fall to the final learning rate.")
    final_lr_fraction: Number = Field(0.0, ge=0, le=1, description="Final learning rate as a part of the peak.")
    wsd_decay_steps_fraction: Number = Field(0.1, ge=0, le=1, description="wsd: part of the steps that decay.")
    weight_decay: Number = Field(0.1, ge=0, description="Decoupled weight decay, on matrices only.")
    max_grad_norm: Number = Field(1.0, ge=0, description="Clip the gradient to this global 2-norm; 0: do not clip.")


class PrecisionKeys(Keys):
    """Precision"""

    recipe: Text = Field("bf16", description="Precision recipe, from an installed plugin.")
    model_dtype: StorageDtype | None = Field(
        None, description="Weights, norms, embeddings and activations; null: the recipe's (bf16)."
    )
    torch_dtype: Annotated[Literal["fp32", "bf16"] | None, BeforeValidator(_dtype_or_auto)] = Field(
        None, description="Another name of `model_dtype`; auto: null."
    )
    matmul_dtype: MatmulDtype | None = Field(None, description="Operands of forward products; null: `model_dtype`.")
    gradient_dtype: GradientDtype | None = Field(
        None, description="Operands of backward products; null: `matmul_dtype`. The recipe checks the pair."
    )
    master_dtype: StorageDtype | None = Field(
        None, description="What the optimizer updates; null: `model_dtype`. A bf16 master is rounded stochastically."
    )
    lora_dtype: StorageDtype | None = Field(None, description="LoRA's weights; null: fp32.")
    param_grad_dtype: StorageDtype | None = Field(None, description="Accumulated gradients; null: fp32.")
    optimizer_state_dtype: StorageDtype | None = Field(None, description="Moments of the optimizer; null: fp32.")
    kernels: Annotated[Literal["compiled", "allow_reference"], BeforeValidator(_word)] = Field(
        "compiled", description="On a GPU: compiled kernels only, or the slow torch reference where there is none."
    )


class MemoryKeys(Keys):
    """Memory"""

    recompute_swiglu: Flag = Field(False, description="Recompute the SwiGLU output in the backward pass.")
    recompute_rmsnorm: Flag = Field(False, description="Recompute the outputs of the norms.")
    recompute_ffn: Flag = Field(False, description="Recompute the feed-forward part; covers swiglu.")
    recompute_qkv: Flag = Field(False, description="Recompute the q, k, v projections.")
    recompute_att: Flag = Field(False, description="Recompute attention; covers qkv. Alias `recompute_attention`.")
    recompute_block: Flag = Field(False, description="Recompute whole blocks; covers att, ffn and rmsnorm.")
    lmhead_chunks: Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto(1))] = Field(
        "auto",
        description="Parts in which the logits are computed; divides batch size x `sequence_len`. On a GPU only those "
        "run that a micro-batch has labels for.",
    )
    attn_bwd_chunks: Int = Field(
        1, ge=1, description="Parts of the attention backward pass; 1 is all that is built: it runs whole."
    )
    offload: Text | None = Field(
        None, description="Strategy that keeps values on the host, from an installed plugin; null or none: none."
    )
    use_cuda_graphs: Flag = Field(True, description="Replay a step as one CUDA graph. Without effect on a CPU.")


class DistributionKeys(Keys):
    """Distribution"""

    gpus: Int = Field(
        1, ge=0, description="GPUs of this machine to train on; 0: all that are visible. Without any, the CPU trains."
    )
    launcher: Text = Field(
        "local", description="What starts the processes of a run and connects their GPUs, from an installed plugin."
    )
    zero_level: Int = Field(1, ge=1, le=3, description="What is sharded over GPUs; 1 is all that is built: nothing.")


THEMES: tuple[type[Keys], ...] = (
    RunKeys, ModelKeys, DataKeys, LoopKeys, OptimizerKeys, PrecisionKeys, MemoryKeys, DistributionKeys,
)  # fmt: skip


class TrainConfig(DistributionKeys, MemoryKeys, PrecisionKeys, OptimizerKeys, LoopKeys, DataKeys, ModelKeys, RunKeys):
    """A run's configuration as core reads it, validated. `load_config` makes it from a user's mapping."""

    @property
    def resolved_run_name(self) -> str:
        return self.run_name or PurePath(self.output_dir).name or "run"

    @property
    def resolved_checkpoint_dir(self) -> str:
        return self.checkpoint_dir or self.output_dir

    @property
    def recompute(self) -> frozenset[str]:
        """What is recomputed, coverage applied: a subset of block, att, ffn, rmsnorm, qkv, swiglu."""
        covers = {"block": ("att", "ffn", "rmsnorm"), "att": ("qkv",), "ffn": ("swiglu",)}
        parts = ("block", "att", "ffn", "rmsnorm", "qkv", "swiglu")
        chosen = {part for part in parts if getattr(self, f"recompute_{part}")}
        for part, covered in covers.items():  # in this order a block's att and ffn go on to cover theirs
            if part in chosen:
                chosen.update(covered)
        return frozenset(chosen)

    @property
    def precision_request(self) -> PrecisionRequest:
        """The dtype keys as a recipe is asked for them."""
        return PrecisionRequest(
            model_dtype=self.model_dtype,
            matmul_dtype=self.matmul_dtype,
            gradient_dtype=self.gradient_dtype,
            master_dtype=self.master_dtype,
            lora_dtype=self.lora_dtype,
            param_grad_dtype=self.param_grad_dtype,
            optimizer_state_dtype=self.optimizer_state_dtype,
        )
