from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

train = load_dataset("trl-lib/Capybara", split="train[:1000]")
args = SFTConfig(
    output_dir="capybara",
    max_length=512,
    packing=True,
    num_train_epochs=1,
    learning_rate=1e-4,
    per_device_train_batch_size=4,
    assistant_only_loss=True,
)
trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    args=args,
    train_dataset=train,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"),
)
trainer.train()
