"""Tables of keys and names that core knows but does not serve: not built, never read, or served by another package.

They say to a user who has a YAML file of the original what each key needs. In core, only this file, `foreign.py` and
`schema.py` may name the things of plugins. A key that an installed plugin declares in its options is served by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import FLAG_WORDS, fold


@dataclass(frozen=True)
class NotYet:
    """A key whose feature is not built. The values `default` and `inert` are accepted and have no effect.

    matters_with: if this key is set too, only `default` is accepted.
    """

    key: str
    default: Any
    meaning: str
    feature: str
    instead: str
    inert: tuple[Any, ...] = ()
    matters_with: str = ""

    def accepts(self, value: Any, given: Collection[str] = ()) -> bool:
        """Return whether `value` has no effect in a config that sets the keys `given`."""
        inert = () if self.matters_with in given else self.inert
        return any(_same(value, harmless) for harmless in (None, self.default, *inert))


@dataclass(frozen=True)
class Dead:
    """A key that nothing reads. accepted: values, besides null, that change nothing; others are refused."""

    key: str
    accepted: tuple[Any, ...]
    instead: str

    def accepts(self, value: Any) -> bool:
        return any(_same(value, inert) for inert in (None, *self.accepted))


@dataclass(frozen=True)
class Limit:
    """A key of TrainConfig for which only the values `works` are built."""

    key: str
    works: tuple[Any, ...]
    instead: str


@dataclass(frozen=True)
class Differs:
    """A key whose default differs from the original's, because that default is not built or not wanted."""

    key: str
    original: str
    why: str


def _same(value: Any, inert: Any) -> bool:
    """Return whether a raw YAML value means `inert`: numbers may be strings, names are folded."""
    if isinstance(inert, list):
        values = value if isinstance(value, list) else [value]
        return len(values) == len(inert) and all(map(_same, values, inert))
    if isinstance(value, bool) or value is None or inert is None:
        return value is inert
    if isinstance(inert, bool):
        return isinstance(value, str) and FLAG_WORDS.get(fold(value)) is inert
    if isinstance(inert, str):
        return isinstance(value, str) and fold(value) == fold(inert)
    try:
        return isinstance(value, int | float | str) and float(value) == float(inert)
    except (ValueError, OverflowError):
        return False


def _feature(feature: str, instead: str, *rows: tuple[Any, ...]) -> Iterator[NotYet]:
    for key, default, meaning, *inert in rows:
        yield NotYet(key, default, meaning, feature, instead, tuple(inert))


_NOT_YET = (
    *_feature(
        "FP4 training", "train with recipe: bf16",
        ("fp4_backend", "cutlass", "library of the FP4 products: cutlass or cudnn", "cudnn"),
        ("fp4_four_over_six", True, "choose the maximum of each block, 4 or 6, by its error"),
        ("no_fp4_stochastic_rounding", False, "round gradients to nearest"),
    ),
    NotYet(
        "adapter_init_mode", "trainable", "what to do with `adapter_path`: merge or trainable",
        "merging a saved adapter before training", "run surogate merge, and train the result",
        inert=("merge",), matters_with="adapter_path",
    ),
    *_feature(
        "mixture-of-experts models", "train a dense text model",
        ("qlora_selective_expert_dequant", False, "dequantise only the experts in use"),
        ("qlora_offload_experts", False, "keep experts on the host"),
    ),
    *_feature(
        "this kind of offloading",
        "remove the key: offload_optimizer, offload_weights, offload_residual and recompute: auto make room",
        ("offload_saved_tensors", False, "keep saved activations on the host"),
        ("cpu_training", False, "stream the weights from the host"),
    ),
    NotYet(
        "persistent_quants", False, "keep quantised weights between steps, which is always done",
        "another choice", "remove the key: offload_quants keeps quantised weights on the host", inert=(True,),
    ),
    *_feature(
        "sharding over GPUs", "remove the key: every GPU holds all weights, gradients and states",
        ("shard_weights", False, "shard weights over GPUs"),
        ("shard_gradients", False, "shard gradients over GPUs"),
    ),
    *_feature(
        "another way to sum over GPUs", "remove the key: gradients are summed by NCCL",
        ("use_all_to_all_reduce", False, "reduce gradients by all-to-all"),
        ("memcpy_all_gather", False, "gather by copies between GPUs"),
        ("memcpy_send_recv", False, "send by copies between GPUs"),
        ("parallelism", None, "ddp or dispatch_pp", "ddp"),
    ),
    *_feature(
        "training on several machines", "train on the GPUs of one machine with gpus",
        ("distributed.ray_address", "auto", "address of a Ray cluster", "local"),
        ("distributed.num_nodes", 1, "machines"),
        ("distributed.gpus_per_node", 0, "GPUs of each machine; 0: all", 1),
        ("distributed.worker_output_dir", None, "output folder on the workers"),
    ),
    *_feature(
        "recommended values", "set the values in the config",
        ("apply_recommended_values", False, "use the training hints of the model"),
    ),
    *_feature(
        "fused RoPE", "remove the key",
        ("use_fused_rope", False, "compute cosines and sines on the fly"),
    ),
    *_feature(
        "long-context training", "remove the key",
        ("long_context", False, "settings for very long rows"),
        ("sequence_chunks", 1, "chunks in which a row is processed"),
        ("auto_lmhead_chunks", None, "choose `lmhead_chunks` by size", True),
        ("lmhead_drop_ignored_rows", False, "skip logits of unlabelled positions, which is always done", True),
    ),
    *_feature(
        "mixture-of-experts and vision models", "train a dense text model",
        ("ep_size", 1, "GPUs over which experts are distributed"),
        ("ep_load_balance_threshold", 1.3, "imbalance that triggers a new plan"),
        ("ep_plan_refresh_interval", 16, "steps between two plans"),
        ("router_aux_loss_coef", None, "weight of the balance loss"),
        ("router_z_loss_coef", None, "weight of the router's z-loss"),
        ("train_router", False, "train the router"),
        ("train_vision", None, "train the vision tower", False),
    ),
    *_feature(
        "distillation", "remove the section",
        ("distillation.teacher_model", None, "the teacher"),
        ("distillation.top_k", 32, "teacher logits kept per token"),
        ("distillation.temperature", 1, "softmax temperature"),
        ("distillation.kd_weight", 0.5, "weight of the teacher's loss"),
        ("distillation.ce_weight", None, "weight of the labels' loss; null: 1 - kd_weight"),
        ("distillation.teacher_batch_size", 4, "rows per teacher batch"),
        ("distillation.kd_dir", None, "folder of teacher logits"),
        ("distillation.teacher_api_base", None, "address of a served teacher"),
        ("distillation.teacher_api_key_var", "VLLM_API_KEY", "environment variable that holds its key"),
        ("distillation.teacher_api_concurrency", 8, "concurrent requests"),
        ("distillation.teacher_api_timeout", 1200, "seconds a request may take"),
    ),
    *_feature(
        "reporting to Aim", "use report_to: tensorboard or wandb",
        ("aim_experiment", "Surogate", "experiment"),
        ("aim_repo", None, "repository"),
        ("aim_name", None, "run name; null: `run_name`"),
    ),
    *_feature(
        "debug reports", "use surogate plan for memory, metrics.jsonl for time",
        ("surogate_metrics_path", None, "file of internal metrics"),
        ("debug_time_breakdown", False, "report the time of each phase. Alias `debug_timing_breakdown`"),
        ("debug_memory_breakdown", False, "report the memory of each segment"),
    ),
    *_feature(
        "adaptive training", "set num_epochs or max_steps, and remove the key",
        ("auto_lr_reduction", False, "lower the learning rate on a plateau"),
        ("early_stop", False, "stop when the evaluation loss rises"),
        ("epoch_adjustment", False, "choose `num_epochs` from the data"),
    ),
)  # fmt: skip

NOT_YET: dict[str, NotYet] = {entry.key: entry for entry in _NOT_YET}
"""By key; a key of a section is dotted."""

SECTIONS: frozenset[str] = frozenset(key.partition(".")[0] for key in NOT_YET if "." in key)

NOT_YET_NAMES: dict[tuple[str, str], str] = {
    ("recipe", "nvfp4"): "use recipe: bf16",
    ("logger", "aim"): "use tensorboard or wandb",
    ("format", "preference"): "use type: conversation with the chosen answers",
}
"""(kind, folded name) of the original that no package provides yet -> what to use. An installed plugin takes
precedence."""

DISTRIBUTIONS: dict[tuple[str, str], str] = {
    ("model", "qwen3"): "surogate-models",
    ("model", "qwen2"): "surogate-models",
    ("model", "llama"): "surogate-models",
    ("recipe", "bf16"): "surogate-recipe-bf16",
    ("recipe", "fp8-hybrid"): "surogate-recipe-fp8",
    ("lowering", "e4m3/e5m2"): "surogate-recipe-fp8",
    ("optimizer", "adamw"): "surogate-optim-adamw",
    ("optimizer", "adamw-8bit"): "surogate-optim-adamw-8bit",
    ("optimizer", "normuon"): "surogate-optim-normuon",
    ("adapter", "lora"): "surogate-lora",
    ("weight format", "nf4"): "surogate-qlora-nf4",
    ("weight format", "fp8"): "surogate-qlora-fp8",
    ("weight format", "fp4"): "surogate-qlora-fp4",
    ("logger", "tensorboard"): "surogate-log-tensorboard",
    ("logger", "wandb"): "surogate-log-wandb",
}
"""(kind, name) -> the package of this project that provides it. Only these are suggested: anybody could register a
package whose name follows a pattern."""


@dataclass(frozen=True)
class Shorthand:
    """A boolean key that selects a plugin: `key: true` means `kind: name`.

    package: what provides the plugin. title: the plugin's name in sentences.
    """

    key: str
    kind: str
    name: str
    package: str
    title: str


ADAPTER_FLAG = Shorthand("lora", "adapter", "lora", DISTRIBUTIONS["adapter", "lora"], "LoRA")
"""`lora: true` means `adapter: lora`, and `surogate sft` sets it by default. Code of core that needs an adapter's name
takes it from here."""

PACKAGES: dict[str, str] = {
    "adamw_beta1": "surogate-optim-adamw-8bit",
    "adamw_beta2": "surogate-optim-adamw-8bit",
    "adamw_epsilon": "surogate-optim-adamw-8bit",
    **dict.fromkeys(
        (
            "normuon_momentum",
            "normuon_beta2",
            "normuon_cautious_wd",
            "normuon_lr_scale",
            "normuon_orthogonalization",
        ),
        "surogate-optim-normuon",
    ),
    **dict.fromkeys(
        ("fp8_amax_history", "fp8_fast_accum", "skip_quant_first_layers", "skip_quant_last_layers"),
        "surogate-recipe-fp8",
    ),
    **dict.fromkeys(
        (
            "lora_rank",
            "lora_alpha",
            "lora_rank_pattern",
            "lora_alpha_pattern",
            "lora_dropout",
            "lora_target_modules",
            "lora_modules_to_save",
            "lora_use_rslora",
        ),
        ADAPTER_FLAG.package,
    ),
    **dict.fromkeys(("qlora_bnb", "qlora_bnb_block_size", "qlora_bnb_double_quant"), "surogate-qlora-nf4"),
    **dict.fromkeys(("qlora_fp8", "qlora_block_size"), "surogate-qlora-fp8"),
    **dict.fromkeys(("qlora_fp4", "qlora_four_over_six"), "surogate-qlora-fp4"),
    "offload_residual": "surogate-offload-residual",
    **dict.fromkeys(
        ("offload_optimizer", "offload_master", "offload_grads", "offload_weights", "offload_quants"),
        "surogate-offload-states",
    ),
    "wandb_project": "surogate-log-wandb",
    "wandb_name": "surogate-log-wandb",
}
"""Key of a package that may not be installed -> the package."""

HELD_FOR_UPDATE = "Set offload_optimizer: true or offload_master: true"
"""What makes the host hold values that the update uses."""

HELD_FOR_DEVICES = (
    "Set offload_residual, offload_grads or offload_quants, or with an adapter offload_weights, where the run has them"
)
"""What makes the host hold values that only devices read."""

DATASET_KEYS: dict[str, str] = dict.fromkeys(("prompt", "chosen", "rejected", "enable_thinking"), "preference")
"""Key of a dataset entry -> the dataset type it belongs to, which is not built."""

LIMITS = (Limit("zero_level", (1,), "sharding over GPUs is not built; set zero_level: 1"),)

IGNORED: dict[str, str] = {
    "model_type": "the architecture is read from the model's config.json",
}
"""Key that nothing reads and whose value cannot matter -> the reason. Accepted with a notice."""

_NO_TEMPLATE = "conversations use the model's own chat template: put chat_template.jinja into the model's folder"

DEAD: dict[str, Dead] = {
    entry.key: entry
    for entry in (
        Dead("min_lr_ratio", (0.0,), "set final_lr_fraction"),
        Dead("model_name", (), "set model"),
        Dead("dataset", (), "set datasets, a list of entries with a path"),
        Dead("use_chat_template", (True,), "set it in the entry of datasets (type: instruction), or use type: text"),
        Dead("template", ("auto",), _NO_TEMPLATE),
        Dead("agent_template", (), _NO_TEMPLATE),
        Dead(
            "system", (), "set system_prompt (type: instruction) or system_field (conversation) in the dataset's entry"
        ),
        Dead("response_prefix", (), "put the prefix into the answers of the data"),
        Dead("max_length", (), "set sequence_len"),
        Dead("padding_side", ("right",), "rows are padded on the right, which does not affect training"),
        Dead("padding_free", (False,), "set sample_packing: true, which leaves little padding"),
        Dead("sequence_parallel_size", (1,), "each row is trained on one GPU"),
        Dead("max_pixels", (), "train a text model"),
        Dead("norm_bbox", (), "train a text model"),
    )
}
"""Keys of the original that nothing reads here: any value except the original's default is refused."""

ALIASES: dict[str, str] = {
    "recompute_attention": "recompute_att",
    "debug_timing_breakdown": "debug_time_breakdown",
}
"""Other name of a key -> the key."""

DIFFERS = (
    Differs("lora", "true", "pre-training trains all weights; `sft` keeps the default"),
    Differs("adapter_init_mode", "merge", "a saved adapter is trained further"),
    Differs("sequence_len", "the model's maximum", "a length that fits most machines"),
    Differs("lmhead_chunks", "1", "chosen to keep the logits small"),
    *(
        Differs(f"recompute_{part}", "true", "`recompute: auto` recomputes what the memory requires")
        for part in ("swiglu", "rmsnorm", "ffn", "qkv", "att", "block", "lora")
    ),
    Differs("recompute", "true", "recomputed is only what the memory requires"),
    Differs("use_zero_copy", "false", "where most time is won, and little memory is lost"),
    Differs("zero_level", "1, the optimizer's states sharded", "every GPU holds all optimizer states"),
    Differs("run_name", "a random name", "runs are named after their folder"),
    Differs("log_file", "log-{run_name}-{time}.json", "metrics are written as JSON lines to `metrics.jsonl`"),
)

DECIDED = {
    "max_grad_norm": "1.0 in the documents, 0 or 1.0 in the code",
    "weight_decay": "0.1, or 0 in later code; here vectors (norms, biases) have no weight decay",
    "fp8_amax_history": "1024 or 16",
    "resume_from_checkpoint": "false, or true in later code",
}
"""Key on which the original's documents and code disagree -> what they say."""
