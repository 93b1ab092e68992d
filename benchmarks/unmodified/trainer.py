"""transformers' Trainer with gradient checkpointing, and on a GPU with bfloat16."""

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("google-bert/bert-base-cased")
reviews = load_dataset("yelp_review_full", split="train").map(
    lambda rows: tokenizer(rows["text"], padding="max_length", truncation=True, max_length=64),
    batched=True,
)
model = AutoModelForSequenceClassification.from_pretrained(
    "google-bert/bert-base-cased", num_labels=5
)
arguments = TrainingArguments(
    output_dir="reviews",
    per_device_train_batch_size=4,
    gradient_checkpointing=True,
    bf16=torch.cuda.is_available(),
)
Trainer(model=model, args=arguments, train_dataset=reviews).train()
