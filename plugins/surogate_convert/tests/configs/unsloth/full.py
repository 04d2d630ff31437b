from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastModel

model, tokenizer = FastModel.from_pretrained(
    model_name = "unsloth/Llama-3.2-1B", max_seq_length = 1024, load_in_4bit = False, full_finetuning = True,
)
dataset = load_dataset("json", data_files = "data/texts.jsonl", split = "train")
trainer = SFTTrainer(
    model = model,
    train_dataset = dataset,
    args = SFTConfig(
        dataset_text_field = "text",
        packing = True,
        per_device_train_batch_size = 8,
        gradient_accumulation_steps = 1,
        num_train_epochs = 2,
        learning_rate = 5e-5,
        warmup_ratio = 0.1,
        embedding_learning_rate = 1e-5,
        optim = "adamw_torch",
        output_dir = "outputs/full",
    ),
)
trainer.train()
