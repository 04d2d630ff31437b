"""Core's keys of a run's YAML file: type, default, range and meaning of each. One class per theme.

`TrainConfig` holds them all. The keys of a plugin are declared by its `options` model; keys of features that are not
built and keys that nothing reads are in `original.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from surogate_core.api import Deterministic, ParamKind, PrecisionRequest, Sharding

from .alerts import parse_alerts
from .dataset_entry import DatasetEntry
from .distribution import DistributionKeys
from .evaluation import EvaluationKeys
from .memory import MemoryKeys
from .rope_scaling import parse_rope_scaling
from .samples import SampleKeys
from .schedule_kinds import Kind
from .values import (
    Day,
    Epochs,
    Flag,
    GradientDtype,
    Int,
    Keys,
    MatmulDtype,
    Names,
    Number,
    PathText,
    PathTexts,
    Seed,
    StorageDtype,
    Text,
    Word,
    count_or_auto,
    dtype_or_auto,
    flag_or_auto,
    parse_kernels,
    parse_resume,
)


class RunKeys(Keys):
    """Run and files"""

    run_name: Text | None = Field(None, description="Name of the run in logs; null: the last part of `output_dir`.")
    output_dir: PathText = Field("output", description="Folder of the trained model, metrics and the resolved config.")
    checkpoint_dir: PathText | None = Field(
        None, description="Folder of the `step_*` checkpoints; null: the same as `output_dir`."
    )
    overwrite_output_dir: Flag = Field(
        False,
        description="Start a new run in folders that hold an earlier run or another model. Their content is renamed to "
        "`*.set_aside`; nothing is deleted. false: such a run is refused.",
    )
    plugins: PathTexts = Field(
        (), description="Plugins without a package: Python files, relative to the folder of the YAML file."
    )
    resume_from_checkpoint: Annotated[bool | int | str, BeforeValidator(parse_resume)] = Field(
        False,
        description="Continue from a checkpoint: true (the newest in `checkpoint_dir`; if there is none, start anew), "
        "a step, the folder of a checkpoint, or last-good (the newest one that is not damaged).",
    )
    resume_with_saved_tokens: Flag = Field(
        False,
        description="Resume with the tokens of the checkpoint, from the token cache that it names, where a mended "
        "fault of a dataset type gives other tokens. false: such a run is refused, with the name of the fault.",
    )
    verify_outputs: Flag = Field(
        True, description="Load every output once, in transformers or PEFT, before the run reports success."
    )
    push_to_hub: Flag = Field(
        False, description="At the end upload the model, or the adapter, with its model card to the Hugging Face Hub."
    )
    hub_model_id: Text | None = Field(
        None,
        description="Repository to upload to: `name` or `owner/name`; null: `run_name`, in the logged-in account.",
    )
    hub_private: Flag | None = Field(
        None, description="Whether a newly created repository is private; null: the default of the account."
    )
    log_file: PathText | None = Field(None, description="File of the metrics; null: `metrics.jsonl` in `output_dir`.")
    report_to: Names = Field((), description="Loggers besides the console and the metrics file: a name or a list.")
    alerts: Annotated[dict[str, Any] | None, BeforeValidator(parse_alerts)] = Field(
        None,
        description="Tell a webhook of NaN, spikes, a stall and a failure: a mapping of `url` (null: the variable "
        "`SUROGATE_ALERT_URL`; outputs never contain it), `events`, `spike_deviations` and `stall_seconds`.",
    )
    logging_steps: Int = Field(1, ge=1, description="Report metrics every N steps.")
    log_gpu_util: Int = Field(
        100,
        ge=0,
        description="Record utilisation, memory, power, temperature and clocks of the GPUs every N steps; 0: never.",
    )


class ModelKeys(Keys):
    """Model"""

    model: Text = Field(description="Hugging Face id, or folder with `config.json`, of the model.")
    from_scratch: Flag = Field(False, description="Start from random weights; only the model's `config.json` is read.")
    init_projections_to_zero: Flag = Field(
        False, description="With `from_scratch`: set output projections to zero, so that blocks start as the identity."
    )
    sequence_len: Int = Field(1024, ge=2, description="Tokens per row.")
    max_model_len: Annotated[Int, Field(ge=2)] | None = Field(
        None, description="Longest sequence the model may see; null: what its `config.json` allows."
    )
    rope_scaling: Annotated[
        dict[str, Any] | None,
        BeforeValidator(parse_rope_scaling),
        WithJsonSchema({"type": ["object", "string", "null"]}, mode="validation"),
    ] = Field(
        None,
        description="RoPE scaling that replaces the one in `config.json` and is saved with the weights: linear, "
        "dynamic, yarn or llama3, or a mapping of `rope_type` and its settings. Default of `factor`: `max_model_len` "
        "divided by the model's own length.",
    )
    adapter: Text | None = Field(
        None, description="Adapter to train instead of all weights, from an installed plugin; null or none: no adapter."
    )
    lora: Flag = Field(
        False,
        description="Train LoRA adapters: the same as `adapter: lora`. Default: true for `sft`, and with a key that "
        "stores the frozen weights in a format (`qlora_bnb`, ...); else false.",
    )
    adapter_path: Text | None = Field(
        None, description="Folder of a saved adapter to train further; same rank, alpha, targets and modules."
    )
    merge_adapter: Flag = Field(
        False, description="At the end also write the base merged with the adapter, as `output_dir`/merged."
    )
    merge_format: Text = Field(
        "hf", description="Export format in which `merge_adapter` writes, such as mxfp4 or gguf:q8_0."
    )
    quantize_lm_head: Flag = Field(
        False, description="Store a frozen LM head in the weight format of the blocks too. A tied one is the embedding."
    )
    quantize_embedding: Flag = Field(
        False, description="Store a frozen embedding in the weight format of the blocks too."
    )


class DataKeys(Keys):
    """Data"""

    datasets: tuple[DatasetEntry, ...] = Field((), description="Training data: a list of entries (below).")
    validation_datasets: tuple[DatasetEntry, ...] | None = Field(
        None, description="Evaluation data; null: a part split from `datasets`."
    )
    validation_split_ratio: Number = Field(
        0.1, ge=0, lt=1, description="Part of `datasets` kept for evaluation; 0 when `validation_datasets` is given."
    )
    loss_scale: Annotated[Literal["default", "last_round", "all"], Word] = Field(
        "default", description="Which tokens of chat data are trained, unless the entry sets its own `loss_scale`."
    )
    template_date: Day | None = Field(
        None,
        description="Date that chat templates write which ask for one (`strftime_now`). null: that of the start, which "
        "run.yaml and checkpoints then have.",
    )
    truncation_strategy: Annotated[Literal["delete", "left", "right", "split"], Word] | None = Field(
        None,
        description="Documents longer than a row: delete (and count) them, cut off the left or the right end, or split "
        "them. null: split text, delete conversations.",
    )
    sample_packing: Flag = Field(
        True, description="Pack several documents into a row; attention does not cross documents."
    )
    train_seed: Seed = Field(1234, description="Seed of initialisation, data order and stochastic rounding.")
    eval_seed: Seed = Field(1234, description="Seed of the evaluation split.")
    dataloader_num_workers: Annotated[int | Literal["auto"], BeforeValidator(count_or_auto(0))] = Field(
        "auto", description="Threads that tokenize; auto: one per core; 0: the main thread alone."
    )


class LoopKeys(Keys):
    """Training loop"""

    loss: Text = Field("next_token", description="What is minimised: core's next_token, or that of a plugin.")
    reference: Annotated[Literal["without_adapter", "frozen", "cached"], Word] = Field(
        "without_adapter",
        description="What losses compare with: the model without its adapter; or the model before the first step. "
        "frozen: a copy of all weights, in their dtype; cached: its log-probabilities, kept with the tokens.",
    )
    reference_model: Text | None = Field(
        None,
        description="Folder or hub id of another model as the frozen reference, of the same sizes, for all weights and "
        "for adapters; null: the run's own model.",
    )
    num_epochs: Epochs = Field(
        3, description="Passes over the data, such as 3 or 0.5; used when `max_steps` is not positive."
    )
    max_steps: Int = Field(-1, ge=-1, description="Optimizer steps; -1 or 0: as many as `num_epochs` takes.")
    per_device_train_batch_size: Int = Field(2, ge=1, description="Rows per micro-step, in evaluation too.")
    gradient_accumulation_steps: Int = Field(4, ge=1, le=65536, description="Micro-steps per optimizer step.")
    max_nonfinite_steps: Int = Field(
        10, ge=0, description="Stop after N consecutive steps with a loss or gradient that is not finite; 0: at once."
    )
    check_finite: Flag = Field(
        False,
        description="Run op by op, and stop at the first op that writes NaN or inf, naming it (`--check-finite`). "
        "Slow.",
    )
    deterministic: Annotated[Deterministic, BeforeValidator(flag_or_auto)] = Field(
        "auto",
        description="Bit-identical results from run to run on a GPU. auto: where it costs little, and the run reports "
        "which ops are not; products use the algorithm that was fastest when this machine first ran them. true: "
        "always; a run that cannot be deterministic is refused, and products use the library's first choice, untimed. "
        "false: the fastest kernels.",
    )


class OptimizerKeys(Keys):
    """Optimizer and schedule"""

    optimizer: Text = Field("adamw_8bit", description="Optimizer, from an installed plugin.")
    learning_rate: Number = Field(2e-4, ge=0, le=1e38, description="Peak learning rate.")
    lr_scheduler_type: Annotated[Kind, Word] = Field(
        "linear",
        description="Decay after the warmup. wsd: constant, then decay over the last part of the steps; the others are "
        "those of transformers.",
    )
    lr_scheduler_kwargs: dict[str, Any] = Field(
        {}, description="Settings of `lr_scheduler_type`, by their names in transformers."
    )
    warmup_ratio: Number = Field(0.0, ge=0, le=1, description="Part of the steps with a linear warmup from 0.")
    warmup_steps: Int = Field(0, ge=0, description="Warmup steps; overrides `warmup_ratio` when positive.")
    cooldown_steps: Int = Field(0, ge=0, description="Last steps, in which the rate falls to its final value.")
    final_lr_fraction: Number = Field(0.0, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    wsd_decay_steps_fraction: Number = Field(0.1, ge=0, le=1, description="wsd: part of the steps that decay.")
    weight_decay: Number = Field(0.1, ge=0, le=1e38, description="Decoupled weight decay, on matrices only.")
    max_grad_norm: Number = Field(
        1.0, ge=0, description="Largest global 2-norm of the gradient, which is clipped to it; 0: no clipping."
    )


class PrecisionKeys(Keys):
    """Precision"""

    recipe: Text = Field("bf16", description="Precision recipe, from an installed plugin.")
    model_dtype: StorageDtype | None = Field(
        None, description="Weights, norms, embeddings and activations; null: the recipe's default (bf16)."
    )
    torch_dtype: Annotated[Literal["fp32", "bf16"] | None, BeforeValidator(dtype_or_auto)] = Field(
        None, description="Another name of `model_dtype`; auto: null."
    )
    matmul_dtype: MatmulDtype | None = Field(None, description="Operands of forward products; null: `model_dtype`.")
    gradient_dtype: GradientDtype | None = Field(
        None, description="Operands of backward products; null: `matmul_dtype`. The recipe checks the pair."
    )
    master_dtype: StorageDtype | None = Field(
        None, description="Weights that the optimizer updates; null: `model_dtype`. bf16 is rounded stochastically."
    )
    lora_dtype: StorageDtype | None = Field(None, description="LoRA weights; null: fp32.")
    param_grad_dtype: StorageDtype | None = Field(None, description="Accumulated gradients; null: fp32.")
    optimizer_state_dtype: StorageDtype | None = Field(None, description="Moments of the optimizer; null: fp32.")
    numerics_report_steps: Int = Field(
        0,
        ge=0,
        description="Report every N steps how the recipe's number formats fit the tensors that it quantizes; 0: never.",
    )
    kernels: Annotated[str | dict[str, str], BeforeValidator(parse_kernels)] = Field(
        "compiled",
        description="compiled: a GPU runs compiled kernels only; allow_reference: the slow PyTorch reference for ops "
        "that have none. Or a mapping of kinds of ops to the packages whose kernels run them, such as "
        "{rmsnorm: acme-kernels}, with one of the words as `default`.",
    )


THEMES: tuple[type[Keys], ...] = (
    RunKeys, ModelKeys, DataKeys, LoopKeys, EvaluationKeys, OptimizerKeys, PrecisionKeys, MemoryKeys, DistributionKeys,
    SampleKeys,
)  # fmt: skip

DTYPE_KEYS: Final[Mapping[str, str]] = {
    "model": "model_dtype",
    "matmul": "matmul_dtype",
    "gradient": "gradient_dtype",
    "master": "master_dtype",
    "adapter": "lora_dtype",
    "param_grad": "param_grad_dtype",
    "optimizer_state": "optimizer_state_dtype",
}
"""Field of `api.Precision` -> the key that sets it."""

RECOMPUTE_KEYS: Final[Mapping[str, str]] = {
    **{part: f"recompute_{part}" for part in ("swiglu", "rmsnorm", "ffn", "qkv", "att", "block", "pairs")},
    "adapter": "recompute_lora",
}
"""Part of a block -> the key that recomputes it."""

STORED_BY: Final[Mapping[ParamKind, str]] = {"head": "quantize_lm_head", "embedding": "quantize_embedding"}
"""Kind of param -> the key that stores it in the weight format, as the matrices of blocks are."""


class TrainConfig(
    SampleKeys, DistributionKeys, MemoryKeys, PrecisionKeys, OptimizerKeys, EvaluationKeys, LoopKeys, DataKeys,
    ModelKeys, RunKeys,
):  # fmt: skip
    """Core's keys of a run, validated. `load_config` makes one from a user's mapping."""

    @property
    def resolved_run_name(self) -> str:
        return self.run_name or PurePath(self.output_dir).name or "run"

    @property
    def resolved_checkpoint_dir(self) -> str:
        return self.checkpoint_dir or self.output_dir

    @property
    def allows_references(self) -> bool:
        """Whether torch references may run ops that have no kernel on a GPU."""
        word = self.kernels.get("default") if isinstance(self.kernels, dict) else self.kernels
        return word == "allow_reference"

    @property
    def kernel_choices(self) -> Mapping[str, str]:
        """{kind of op: distribution whose kernel runs it}."""
        chosen = self.kernels if isinstance(self.kernels, dict) else {}
        return {kind: distribution for kind, distribution in chosen.items() if kind != "default"}

    @property
    def recomputed_parts(self) -> frozenset[str]:
        """The parts of a block that are recomputed in any case; see `assembly.recomputed`."""
        chosen = {part for part, key in RECOMPUTE_KEYS.items() if getattr(self, key)}
        whole = {"block", "adapter"} if self.recompute == "true" else set()
        return frozenset((chosen | whole) - ({"adapter"} if self.adapter is None else set()))

    def sharding(self, ranks: int) -> Sharding:
        """Return what each of the run's ranks holds a part of."""
        gradients = self.zero_level >= 2 if self.shard_gradients is None else self.shard_gradients
        weights = self.zero_level >= 3 if self.shard_weights is None else self.shard_weights
        several = ranks > 1
        divided = {"gradients": several and gradients, "weights": several and weights}
        return Sharding(parts=ranks, states=several, **divided, whole_blocks=self.whole_blocks)

    @property
    def precision_request(self) -> PrecisionRequest:
        """The dtype keys, as a recipe receives them."""
        return PrecisionRequest(**{f"{field}_dtype": getattr(self, key) for field, key in DTYPE_KEYS.items()})
