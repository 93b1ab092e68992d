"""The ledger: the bytes of a plain training step, by formula, each term with its name.

A step of `memlab.model.GPT` in float32 with fused attention and AdamW holds

    4·N                                            weights
    4·N                                            gradients
    8·N + 4 per tensor                             AdamW's two moments, and its step counters
    4·B·T·L·(8·C + 2·KV·D + 4·hidden + H + 2)      saved by a Llama's blocks for backward
    4·B·T·(3·C + 1 + V) + 4                        saved by the ends: embedding, norm, logits, loss

A step with many tokens has its peak when backward begins: no gradients yet, all activations, and
two more tensors of the logits' size. With few tokens the peak is later, when the last gradient is
ready or in the optimizer. If heads are not C/H wide, 2·C of the 8·C are 2·H·D. An additional norm
saves its input, the normalized input, and 1/rms. Biases, another activation in the gate, and scaled
embeddings save nothing more. The formulas describe the CPU's kernels, and a test compares each with
the meter to the byte. On another device a fused kernel may save more.

Source   Korthikanti et al. 2022, arXiv 2205.05198, section 4, counts a GPT-3 block in the same way.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memlab.model import GPTConfig

FLOAT32 = 4  # bytes
INT64 = 8


def state_bytes(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Return the bytes of the existing tensors: parameters, gradients, optimizer_state.

    Each storage counts once, so a tied weight counts once. Gradients exist after backward, and an
    optimizer's state after its first step.
    """
    parameters = list(model.parameters())
    state = [] if optimizer is None else _tensors(list(optimizer.state.values()))
    return {
        "parameters": _storage_bytes(parameters),
        "gradients": _storage_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer_state": _storage_bytes(state),
    }


def activation_terms(config: GPTConfig, batch: int, seq_len: int) -> dict[str, int]:
    """Return the bytes that the forward pass saves for backward, by layer type."""
    C, H, V, L = config.hidden_size, config.heads, config.vocab_size, config.layers
    H_D, KV_D = H * config.head_dim, config.kv_heads * config.head_dim
    head_norms = 2 * (H_D + KV_D) + H + config.kv_heads if config.head_norms else 0
    post_norms = 2 * (2 * C + 1) if config.post_norms else 0
    more_norms = L * (head_norms + post_norms)  # the input, the normalized input; 1/rms
    per_token = {  # float32 elements
        "residual_stream": C + 2 * L * C,  # the embedding, and the sums after attention and MLP
        "norms": (2 * L + 1) * (2 * C + 1) + more_norms,  # normalized, then scaled; 1/rms
        "attention": L * (H_D + 2 * KV_D + H_D + H),  # q, k, v; the output; log-sum-exp
        "mlp": L * 4 * config.intermediate_size,  # gate, silu(gate), up, their product
        "logits": V,  # as log-probabilities
    }
    tokens = batch * seq_len
    terms = {name: FLOAT32 * tokens * count for name, count in per_token.items()}
    return terms | {"loss": FLOAT32}


def activation_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Return the bytes that the forward pass saves for backward."""
    return sum(activation_terms(config, batch, seq_len).values())


def start_of_backward_terms(config: GPTConfig, batch: int, seq_len: int) -> dict[str, int]:
    """Return the live bytes at the start of backward, from the second step on, by category."""
    N, V, tokens = config.parameters, config.vocab_size, batch * seq_len
    angles = config.seq_len * config.head_dim // 2  # rotary angles for the maximum length
    return {
        "parameters": FLOAT32 * N,
        "buffers": 2 * FLOAT32 * angles,
        "optimizer_state": 2 * FLOAT32 * N + FLOAT32 * _weight_tensors(config),
        "inputs": 2 * INT64 * tokens,
        "activations": activation_bytes(config, batch, seq_len),
        # The gradients of the loss, of the log-probabilities, and of the logits.
        "backward_temporaries": FLOAT32 + 2 * FLOAT32 * tokens * V,
    }


def start_of_backward_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Return the live bytes at the start of backward, the peak of a step with many tokens."""
    return sum(start_of_backward_terms(config, batch, seq_len).values())


def largest_batch(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    """Return the largest batch that fits into the budget; 0 if none does.

    `bytes_at(batch)` returns the bytes for a batch, by formula or by measurement, and must never
    decrease. It is called about 2·log₂(result) times.
    """
    fits, too_many = 0, 1
    while bytes_at(too_many) <= budget_bytes:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if bytes_at(middle) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    return fits


def _weight_tensors(config: GPTConfig) -> int:
    """Return the number of weight tensors. AdamW has a step counter for each."""
    more = len(set(config.attention_biases))
    more += 2 * (config.head_norms + config.post_norms)
    return (9 + more) * config.layers + (2 if config.tied else 3)


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(nested: Any) -> list[torch.Tensor]:
    """Return all tensors in an optimizer's nested state."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = list(nested.values())
    if isinstance(nested, (list, tuple)):
        return [tensor for part in nested for tensor in _tensors(part)]
    return []
