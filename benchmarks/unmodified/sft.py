"""Supervised fine-tuning with trl, as its documentation starts."""

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=SFTConfig(
        output_dir="Qwen2.5-SFT",
        per_device_train_batch_size=2,
        max_length=256,
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
