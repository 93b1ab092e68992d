"""LoRA and QLoRA steps as fitcheck measured them on a Tesla T4 (benchmarks/evidence/t4.json).

Weights are random: only their shapes count. The measured runs loaded 4-bit weights with
`from_pretrained(device_map=…)`, which leaves other gaps in the pool than quantizing in `cuda()`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

_ATTENTION = F.scaled_dot_product_attention


def build(shape: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Callable[[], None], Any, Any]:
    """Return (step, model, optimizer) of a row; `shape` is its entry in model_configs."""
    config = _config(shape)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float16, attn_implementation=run["attn_impl"]
    )
    has_four_bits = run["quantization"] == "nf4"
    if has_four_bits:
        _to_four_bits(model)
    model.cuda()
    if has_four_bits:
        model.is_loaded_in_4bit = True
        model = prepare_model_for_kbit_training(model)
    rank = run["lora_rank"]
    adapters = LoraConfig(
        r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", target_modules=run["lora_targets"]
    )
    model = get_peft_model(model, adapters)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    size = run["batch_size"], run["seq_len"]
    tokens = torch.randint(0, config.vocab_size, size, device="cuda")
    attention = _efficient_attention if run["attn_impl"] == "sdpa" else nullcontext
    return partial(_step, model, optimizer, tokens, attention), model, optimizer


def _step(
    model: nn.Module, optimizer: Any, tokens: torch.Tensor, attention: Callable[[], Any]
) -> None:
    with attention():
        optimizer.zero_grad(set_to_none=True)
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        optimizer.step()


def _config(shape: Mapping[str, Any]) -> Any:
    kind = Qwen2Config if "Qwen" in shape["name"] else LlamaConfig
    return kind(
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"],
        head_dim=shape["head_dim"],
        tie_word_embeddings=shape["tie_word_embeddings"],
        max_position_embeddings=8192,
        use_cache=False,
    )


def _to_four_bits(model: PreTrainedModel) -> None:
    """Replace all linear layers but the head by bitsandbytes', which quantize in `cuda()`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        has_bias = module.bias is not None
        four_bits = Linear4bit(
            module.in_features, module.out_features, has_bias, torch.float16, quant_type="nf4"
        )
        four_bits.weight = Params4bit(
            module.weight.data, quant_type="nf4", compress_statistics=False, module=four_bits
        )
        four_bits.bias = module.bias
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, four_bits)


def _with_all_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """Repeat grouped heads, as the measured runs did, so that the efficient kernel takes them."""
    options.pop("enable_gqa", None)
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    return _ATTENTION(query, key, value, *args, **options)


@contextmanager
def _efficient_attention() -> Iterator[None]:
    """Run attention by the memory-efficient kernel alone."""
    with (
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        patch.object(F, "scaled_dot_product_attention", _with_all_heads),
    ):
        yield
