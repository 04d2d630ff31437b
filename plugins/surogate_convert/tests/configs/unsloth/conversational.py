from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
from unsloth.chat_templates import get_chat_template, train_on_responses_only

model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-14B", max_seq_length = 2048, load_in_4bit = True)
model = FastLanguageModel.get_peft_model(
    model, r = 32, lora_alpha = 32, target_modules = "all-linear", use_gradient_checkpointing = "unsloth",
    random_state = 3407,
)
tokenizer = get_chat_template(tokenizer, chat_template = "qwen-3")
data = load_dataset("mlabonne/FineTome-100k", split = "train")
trainer = SFTTrainer(
    model = model,
    tokenizer = tokenizer,
    train_dataset = data,
    args = SFTConfig(
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 4,
        warmup_steps = 5,
        num_train_epochs = 1,
        learning_rate = 2e-4,
        optim = "adamw_8bit",
        weight_decay = 0.001,
        lr_scheduler_type = "linear",
        report_to = "none",
    ),
)
trainer = train_on_responses_only(
    trainer, instruction_part = "<|im_start|>user\n", response_part = "<|im_start|>assistant\n",
)
trainer.train()
