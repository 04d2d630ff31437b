"""Keys of other trainers: Hugging Face's Trainer and TRL, axolotl, Unsloth, LLaMA-Factory, torchtune.

They are never accepted, because their meaning differs in details. The error names the key to use instead.
"""

from __future__ import annotations

from collections.abc import Iterator


def _same_key(key: str, *names: str) -> Iterator[tuple[str, str]]:
    return ((name, key) for name in names)


ELSEWHERE: dict[str, str] = dict(
    (
        *_same_key("model", "base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_path"),
        *_same_key("output_dir", "out_dir", "output_path", "output_directory", "save_dir", "output_folder"),
        *_same_key("overwrite_output_dir", "overwrite_output_directory", "overwrite_output"),
        *_same_key("learning_rate", "lr"),
        *_same_key("lr_scheduler_type", "scheduler", "lr_scheduler"),
        *_same_key("final_lr_fraction", "min_lr", "min_lr_rate", "cosine_min_lr_ratio"),
        *_same_key("warmup_steps", "warmup", "lr_warmup_steps", "num_warmup_steps"),
        *_same_key("optimizer", "optim"),
        *_same_key("num_epochs", "epochs", "num_train_epochs", "n_epochs"),
        *_same_key("max_steps", "steps", "max_train_steps", "total_steps", "max_steps_per_epoch"),
        *_same_key("per_device_train_batch_size", "batch_size", "micro_batch_size", "train_batch_size"),
        *_same_key("per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_batch_size"),
        *_same_key("gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps", "gradient_accumulation"),
        *_same_key("sequence_len", "seq_len", "max_seq_length", "max_seq_len", "cutoff_len", "model_max_length"),
        *_same_key("sequence_len", "sequence_length", "block_size", "context_length"),
        *_same_key("max_grad_norm", "max_grad_clip", "gradient_clipping", "clip_grad_norm", "max_norm"),
        *_same_key("train_seed", "seed", "random_seed", "data_seed"),
        *_same_key("sample_packing", "packing", "neat_packing", "packed"),
        *_same_key("dataloader_num_workers", "preprocessing_num_workers", "dataset_num_proc", "dataset_processes"),
        *_same_key("resume_from_checkpoint", "resume", "auto_resume_from_checkpoints"),
        *_same_key("gpus", "n_gpu", "num_gpus", "num_processes", "nproc_per_node"),
        *_same_key("hub_private", "hub_private_repo", "hub_private_model"),
        *_same_key("validation_datasets", "test_datasets", "eval_dataset", "eval_datasets", "validation_file"),
        *_same_key("validation_split_ratio", "val_size", "test_size", "validation_split"),
        *_same_key("datasets", "dataset_name", "dataset_path", "train_file", "data_path", "dataset_dir", "train_data"),
        *_same_key("adapter_path", "lora_model_dir", "adapter_name_or_path", "peft_model_id"),
        *_same_key("merge_adapter", "merge_lora", "merge_and_unload"),
        *_same_key("qlora_bnb", "qlora_nf4", "qlora_4bit"),
        *_same_key("qlora_fp8", "qlora_8bit"),
        *_same_key("qlora_fp4", "qlora_nvfp4"),
        *_same_key("qlora_bnb_double_quant", "bnb_4bit_use_double_quant", "double_quantization"),
        *_same_key("lora_rank", "lora_r"),
        *_same_key("lora_use_rslora", "use_rslora", "peft_use_rslora"),
        *_same_key("lora_target_modules", "target_modules", "lora_target"),
        *_same_key("lora_modules_to_save", "modules_to_save", "additional_target"),
        *_same_key("lora_rank_pattern", "rank_pattern"),
        *_same_key("lora_alpha_pattern", "alpha_pattern"),
        *_same_key("adamw_beta1", "adam_beta1"),
        *_same_key("adamw_beta2", "adam_beta2"),
        *_same_key("adamw_epsilon", "adam_epsilon"),
        *_same_key("wandb_name", "wandb_run_name"),
    )
)
"""Folded key of another trainer -> our key of the same meaning."""


def _hint(hint: str, *names: str) -> Iterator[tuple[str, str]]:
    return ((name, hint) for name in names)


HINTS: dict[str, str] = dict(
    (
        *_hint("metrics and pictures are written to output_dir; the metrics file is log_file", "logging_dir"),
        *_hint("evaluate every N steps with eval_steps; 0: never", "evaluation_strategy", "eval_strategy"),
        *_hint("evaluate every N steps with eval_steps; 0: never", "do_eval", "evals_per_epoch"),
        *_hint("save every N steps with save_steps; 0: only at the end", "save_strategy", "saves_per_epoch"),
        *_hint("report every N steps with logging_steps", "logging_strategy", "log_every_n_steps"),
        *_hint(
            "evaluation uses per_device_train_batch_size too; remove the key",
            *("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_batch_size"),
        ),
        *_hint(
            "set the part kept for evaluation, below 1, with validation_split_ratio",
            "val_set_size",
        ),
        *_hint(
            "recompute: auto, the default, recomputes what the memory requires; set recompute: true for everything",
            *("gradient_checkpointing", "use_gradient_checkpointing", "gradient_checkpointing_kwargs"),
            *("activation_checkpointing", "enable_activation_checkpointing"),
        ),
        *_hint("set model_dtype: bf16, which is the default", "bf16", "pure_bf16", "use_bf16"),
        *_hint("fp16 is not built; set model_dtype: bf16, which is the default, or fp32", "fp16", "float16", "half"),
        *_hint("set model_dtype: bf16 or fp32, and matmul_dtype for the products", "dtype", "mixed_precision", "tf32"),
        *_hint(
            "attention is always fused on a GPU; remove the key",
            *("flash_attention", "flash_attn", "use_flash_attention", "use_flash_attention_2", "attn_implementation"),
            *("xformers_attention", "sdp_attention"),
        ),
        *_hint("set lora: true, and lora_target_modules: [all-linear], which is the default", "lora_target_linear"),
        *_hint("set lora: true to train an adapter, or false to train all weights", "use_peft", "use_lora"),
        *_hint("set lora: true to train an adapter, or false to train all weights", "finetuning_type", "peft_type"),
        *_hint("set qlora_bnb: true for frozen weights in NF4, with lora: true", "load_in_4bit", "bnb_4bit_quant_type"),
        *_hint("set qlora_fp8: true for frozen weights in FP8, with lora: true", "load_in_8bit"),
        *_hint(
            "set qlora_bnb: true (NF4), qlora_fp8: true or qlora_fp4: true (NVFP4), with lora: true",
            *("quantization_bit", "quantization_method", "qlora", "use_qlora"),
        ),
        *_hint("DoRA is not built; remove the key", "use_dora", "peft_use_dora"),
        *_hint("set loss_scale: all to train prompts too, or default to train only answers", "train_on_inputs"),
        *_hint("set loss_scale: all to train prompts too, or default to train only answers", "train_on_prompt"),
        *_hint("set loss_scale: last_round to train only the last answers", "mask_history"),
        *_hint("set text_field in the entry of datasets", "dataset_text_field"),
        *_hint("the model's own chat template is used; put chat_template.jinja into its folder", "chat_template"),
        *_hint("the tokenizer of the model is used; remove the key", "tokenizer", "tokenizer_name", "tokenizer_type"),
        *_hint("code of a model's repository is never run; remove the key", "trust_remote_code"),
        *_hint("sharding is not built; set gpus to train on several GPUs of one machine", "deepspeed", "fsdp"),
        *_hint("sharding is not built; set gpus to train on several GPUs of one machine", "fsdp_config"),
        *_hint("a step runs as CUDA graphs of compiled kernels; remove the key", "torch_compile", "compile"),
        *_hint("a step runs as CUDA graphs of compiled kernels; remove the key", "use_liger_kernel", "use_unsloth"),
        *_hint("set num_epochs or max_steps; nothing ends a run early", "early_stopping_patience"),
        *_hint("the last weights are saved; the best step is in metrics.jsonl", "load_best_model_at_end"),
        *_hint("the last weights are saved; the best step is in metrics.jsonl", "metric_for_best_model"),
        *_hint("use `surogate pt` or `surogate sft`", "stage", "do_train"),
        *_hint("not built; remove the key", "neftune_noise_alpha", "label_smoothing_factor", "loraplus_lr_ratio"),
        *_hint("rows are packed, so there is little padding; remove the key", "group_by_length", "pad_to_sequence_len"),
        *_hint("log in with `hf auth login`, or set HF_TOKEN in the environment", "hub_token", "hf_token"),
        *_hint("set WANDB_ENTITY in the environment", "wandb_entity"),
    )
)
"""Folded key of another trainer -> what to do here. For keys that have no equivalent."""
