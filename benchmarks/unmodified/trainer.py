"""transformers' Trainer on a tokenized data set, with gradient checkpointing and bfloat16."""

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
    output_dir="reviews", per_device_train_batch_size=4, gradient_checkpointing=True, bf16=True
)
Trainer(model=model, args=arguments, train_dataset=reviews).train()
