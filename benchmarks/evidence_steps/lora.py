"""LoRA and QLoRA steps as fitcheck measured them on a Tesla T4 (benchmarks/evidence/t4.json).

Weights are random: only their shapes count. 4-bit weights are loaded with transformers' own loader,
which leaves other gaps in the pool than quantizing in `cuda()`: it allocates the model's bytes once
and frees them, then copies weights to the GPU in float16 and quantizes them one by one.
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
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    core_model_loading,
)

_ATTENTION = F.scaled_dot_product_attention
_SPAWN = core_model_loading.spawn_materialize
# Two runs of one setting differ by 8 MiB, as if worker threads had loaded the weights. With this
# loader the 14 rows are within 0.14 % allocated and 3.9 % reserved; with quantization in `cuda()`
# within 1.00 % and 6.2 %. The constants below move reserved memory alone (2.3 % in the median
# without them), so only the allocated figures are evidence for a mechanism.
# Fitted to the 14 4-bit rows: a thread's copies in 0.1 s at 1 GB/s, and later per byte quantized.
_AHEAD_BYTES = 100e6
_AHEAD_SHARE = 0.95


def build(shape: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Callable[[], None], Any, Any]:
    """Return (step, model, optimizer) of a row; `shape` is its entry in model_configs."""
    config = _config(shape)
    options = {"dtype": torch.float16, "attn_implementation": run["attn_impl"]}
    if run["quantization"] == "nf4":
        model = _load_in_four_bits(config, **options)
        model = prepare_model_for_kbit_training(model, auto_clear_cache=False)
    else:
        model = AutoModelForCausalLM.from_config(config, **options).cuda()
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


def _load_in_four_bits(config: Any, **options: Any) -> PreTrainedModel:
    """Load random weights with `from_pretrained`, which quantizes them on the GPU."""
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = made.state_dict()
    for tied in made.all_tied_weights_keys:  # not in a checkpoint
        del weights[tied]
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    options |= {"config": config, "quantization_config": four_bits, "device_map": {"": 0}}
    with patch.object(core_model_loading, "spawn_materialize", _ReadAhead().spawn):
        return type(made).from_pretrained(None, state_dict=weights, **options)


class _ReadAhead:
    """Copy weights to the GPU before the loader quantizes them, as its worker threads do.

    While the loader waits for a weight (the embedding comes first), another thread copies as many
    bytes. It copies _AHEAD_BYTES while the first kernel loads, and later a little less than the
    loader quantizes. The gaps that the copies leave in the pool last until the measured step.
    """

    def __init__(self) -> None:
        self._jobs: list[tuple[Callable[[], torch.Tensor], int]] = []  # and bytes in float16
        self._copied: dict[int, torch.Tensor] = {}
        self._count = 0  # weights copied so far
        self._budget_bytes = _AHEAD_BYTES

    def spawn(self, pool: Any, weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Replace `core_model_loading.spawn_materialize`."""
        self._jobs.append((_SPAWN(None, weight, *args, **options), 2 * weight.numel()))
        return partial(self._take, len(self._jobs) - 1)

    def _take(self, index: int) -> torch.Tensor:
        is_late = index == self._count
        num_bytes = self._copy() if is_late else _AHEAD_SHARE * self._jobs[index][1]
        self._budget_bytes += num_bytes
        while self._count < len(self._jobs) and self._budget_bytes > 0:
            self._budget_bytes -= self._copy()
        return self._copied.pop(index)

    def _copy(self) -> int:
        """Copy the next weight and return its bytes."""
        job, num_bytes = self._jobs[self._count]
        self._copied[self._count] = job()
        self._count += 1
        return num_bytes


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
