"""Small transformers models, trained in a loop or with Trainer, trl and peft."""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    DataCollatorWithPadding,
    DetrConfig,
    DetrForObjectDetection,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

VOCABULARY = 512


def _trained(model, **batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()

    def step():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def _tokens(rows=2, length=64):
    return torch.randint(3, VOCABULARY, (rows, length))


def _causal(model):
    tokens = _tokens()
    return _trained(model, input_ids=tokens, labels=tokens)


def _llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def bert_classification():
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=3,
    )
    tokens = _tokens(4)
    mask = torch.ones_like(tokens)
    return _trained(
        BertForSequenceClassification(config),
        input_ids=tokens,
        attention_mask=mask,
        labels=torch.randint(0, 3, (4,)),
    )


def gpt2():
    return _causal(
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4))
    )


def llama():
    return _causal(_llama())


def llama_with_gradient_checkpointing():
    model = _llama()
    model.gradient_checkpointing_enable()
    return _causal(model)


def mixtral():
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return _causal(MixtralForCausalLM(config))


def qwen3_moe():
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return _causal(Qwen3MoeForCausalLM(config))


def mamba():
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2, use_cache=False
    )
    tokens = _tokens(1, 16)
    return _trained(MambaForCausalLM(config), input_ids=tokens, labels=tokens)


def t5():
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return _trained(T5ForConditionalGeneration(config), input_ids=_tokens(), labels=_tokens(2, 16))


def vit():
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return _trained(
        ViTForImageClassification(config),
        pixel_values=torch.randn(4, 3, 32, 32),
        labels=torch.randint(0, 10, (4,)),
    )


def clip():
    text = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
    text |= {"intermediate_size": 128, "num_attention_heads": 4, "eos_token_id": 2}
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"intermediate_size": 128, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    return _trained(
        CLIPModel(config),
        input_ids=_tokens(4, 16),
        pixel_values=torch.randn(4, 3, 32, 32),
        return_loss=True,
    )


def segformer():
    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 40, 64], decoder_hidden_size=32, num_labels=5
    )
    return _trained(
        SegformerForSemanticSegmentation(config),
        pixel_values=torch.randn(2, 3, 64, 64),
        labels=torch.randint(0, 5, (2, 64, 64)),
    )


def detr():
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "layer_type": "basic",
            "out_features": ["stage2"],
        },
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=10,
        num_labels=4,
    )
    labels = [
        {"class_labels": torch.tensor([1, 2]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]] * 2)},
        {"class_labels": torch.tensor([3]), "boxes": torch.tensor([[0.4, 0.4, 0.3, 0.2]])},
    ]
    return _trained(
        DetrForObjectDetection(config), pixel_values=torch.randn(2, 3, 64, 64), labels=labels
    )


def wav2vec2_ctc():
    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    return _trained(
        Wav2Vec2ForCTC(config),
        input_values=torch.randn(2, 4000),
        labels=torch.randint(1, 32, (2, 12)),
    )


# ------------------------------------------------------------------ Trainer, trl, peft


ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(200)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _sentence(start, length):
    return " ".join(f"w{(start + i) % 200}" for i in range(length))


def trainer():
    """Count a whole `train()` of two steps as one step."""
    model, tokenizer = _llama(), _tokenizer()
    data = []
    for i in range(16):
        tokens = tokenizer(_sentence(i, 20))["input_ids"]
        data.append({"input_ids": tokens, "labels": tokens})
    made = Trainer(
        model=model,
        args=TrainingArguments(tempfile.mkdtemp(), use_cpu=True, **ARGUMENTS),
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    return made.train, model, None


def trainer_in_bfloat16():
    """Train in bfloat16; the machine decides whether on a GPU."""
    model = _llama()
    data = [{"input_ids": torch.arange(20) + i, "labels": torch.arange(20) + i} for i in range(16)]
    arguments = TrainingArguments(tempfile.mkdtemp(), bf16=True, **ARGUMENTS)
    made = Trainer(model=model, args=arguments, train_dataset=data)
    return made.train, model, None


def sft():
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = _llama()
    data = Dataset.from_dict({"text": [_sentence(i, 10 + i) for i in range(16)]})
    made = SFTTrainer(
        model=model,
        args=SFTConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, **ARGUMENTS),
        train_dataset=data,
        processing_class=_tokenizer(),
    )
    return made.train, model, None


def dpo():
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model = _llama()
    data = Dataset.from_dict(
        {
            "prompt": [_sentence(i, 8) for i in range(16)],
            "chosen": [_sentence(i + 50, 6 + i % 4) for i in range(16)],
            "rejected": [_sentence(i + 100, 5 + i % 3) for i in range(16)],
        }
    )
    made = DPOTrainer(
        model=model,
        ref_model=_llama(),
        args=DPOConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, **ARGUMENTS),
        train_dataset=data,
        processing_class=_tokenizer(),
    )
    return made.train, model, None


def _adapted(**options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return _causal(get_peft_model(_llama(), config))


def lora():
    return _adapted()


def dora():
    return _adapted(use_dora=True)


def accelerate_loop():
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(_tokens(16, 32), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch():
        for tokens in loader:
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return epoch, model, optimizer
