from datasets import load_dataset
from trl import RewardConfig, RewardTrainer

trainer = RewardTrainer(
    model="Qwen/Qwen3-0.6B",
    args=RewardConfig(output_dir="reward", center_rewards_coefficient=0.01, per_device_train_batch_size=4),
    train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
)
trainer.train()
