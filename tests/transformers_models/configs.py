"""Tiny configs of many families, as fields of their config.json."""

from typing import Any

DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 96}
TWO_STACKS = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
WHISPER = {
    **TWO_STACKS,
    "max_source_positions": 30,
    "max_target_positions": 32,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOUND = {
    **ENCODER,
    "conv_dim": [16, 16],
    "conv_stride": [320, 4],
    "conv_kernel": [320, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
VISION = {**IMAGES, "num_hidden_layers": 2, "projection_dim": 16}


def _shared(fields: dict[str, Any], names: str) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), fields)


# By model_type.
TINY: dict[str, dict[str, Any]] = {
    **_shared(DECODER, "llama mistral qwen2 qwen3 phi phi3 gemma gemma2 granite olmo olmo2"),
    **_shared(DECODER, "stablelm starcoder2 cohere glm4 nemotron smollm3 gpt_neox persimmon"),
    **_shared({**DECODER, "num_local_experts": 4}, "mixtral phimoe granitemoe"),
    **_shared({**DECODER, **EXPERTS}, "qwen2_moe qwen3_moe olmoe"),
    "gpt_oss": {**DECODER, "num_local_experts": 4, "head_dim": 8},
    **_shared({**DECODER, **DEEPSEEK}, "deepseek_v3"),
    "llama4_text": {
        **DECODER,
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "head_dim": 8,
    },
    "jamba": {
        **DECODER,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    **_shared(GPT, "gpt2 gpt_bigcode"),
    "gptj": {**GPT, "rotary_dim": 4},
    "opt": {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96},
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 96,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 96, "state_size": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "vocab_size": 96,
        "state_size": 4,
        "head_dim": 8,
        "num_heads": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    **_shared(ENCODER, "bert roberta electra albert modernbert deberta-v2 mpnet esm"),
    "distilbert": {
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    },
    **_shared(T5, "t5 mt5"),
    **_shared(TWO_STACKS, "bart pegasus"),
    "whisper": WHISPER,
    **_shared(IMAGES, "vit deit dinov2"),
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "convnext": {"image_size": 32, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2},
    "wav2vec2": SOUND,
    "qwen2_vl": {
        "text_config": {
            **DECODER,
            "model_type": "qwen2_vl_text",
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        },
        "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
    },
    "gemma3": {
        "text_config": {**DECODER, "model_type": "gemma3_text", "head_dim": 8},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    },
    "llava": {
        "text_config": {**DECODER, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
    },
}
WITHOUT_TEXT = ("vit", "deit", "dinov2", "swin", "convnext")
