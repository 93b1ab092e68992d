"""Direct preference optimization with trl: two models, and reference logits."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"),
    args=DPOConfig(
        output_dir="Qwen2.5-DPO",
        per_device_train_batch_size=1,
        max_length=256,
        bf16=torch.cuda.is_available(),
    ),
    processing_class=AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B"),
    train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
)
trainer.train()
