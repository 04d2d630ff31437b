from unsloth import FastLanguageModel, PatchDPOTrainer
PatchDPOTrainer()
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

max_seq_length = 4096
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/zephyr-sft-bnb-4bit", max_seq_length = max_seq_length, dtype = None, load_in_4bit = True,
)
raw = load_dataset("HuggingFaceH4/ultrafeedback_binarized")
model = FastLanguageModel.get_peft_model(
    model, r = 64, target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha = 64, lora_dropout = 0, bias = "none", use_gradient_checkpointing = "unsloth", random_state = 3407,
    use_rslora = False, loftq_config = None,
)
trainer = DPOTrainer(
    model = model,
    ref_model = None,
    args = DPOConfig(
        per_device_train_batch_size = 2, gradient_accumulation_steps = 4, warmup_ratio = 0.1, num_train_epochs = 3,
        learning_rate = 5e-6, logging_steps = 1, optim = "adamw_8bit", weight_decay = 0.0,
        lr_scheduler_type = "linear", seed = 42, output_dir = "outputs", report_to = "none",
    ),
    beta = 0.1,
    train_dataset = raw["train_prefs"],
    tokenizer = tokenizer,
    max_length = 1024,
    max_prompt_length = 512,
)
trainer.train()
model.save_pretrained("lora_model")
