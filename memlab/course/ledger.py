"""The ledger: the bytes of a plain training step, by formula, every term with its name.

A step of `memlab.model.GPT` in float32 with fused attention and AdamW holds

    4·N                                            weights
    4·N                                            gradients
    8·N + 4 a tensor                               AdamW's two moments, and its counters
    4·B·T·L·(8·C + 2·KV·D + 4·hidden + H + 2)      what a Llama's blocks keep for backward
    4·B·T·(3·C + 1 + V) + 4                        what the ends keep: embedding, norm, logits, loss

and the peak of a step with many tokens is the moment when backward begins: no gradients yet, all
activations, and two more tensors as large as the logits. With few tokens the peak is later: when
the last gradient is there, or in the optimizer. Where heads are not C/H wide, 2·C of the 8·C are
2·H·D. A further norm keeps its input, that normalised, and 1/rms; biases, another activation in the
gate and scaled embeddings keep nothing more. The formulas are those of the CPU's kernels, and a
test holds each against the meter, to the byte; on another device a fused kernel may keep more.

Source   Korthikanti et al. 2022, arXiv 2205.05198, section 4, counts a GPT-3 block in the same way.
"""

from collections.abc import Callable
from typing import Any

import torch

from memlab.model import GPTConfig

FLOAT32 = 4  # bytes
INT64 = 8


def state_bytes(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Bytes of the tensors that are there now: parameters, gradients, optimizer_state.

    Storages are counted, each once: a tied weight is one storage. Gradients are there after
    backward, an optimizer's state after its first step.
    """
    parameters = list(model.parameters())
    state = [] if optimizer is None else _tensors(list(optimizer.state.values()))
    return {
        "parameters": _storage_bytes(parameters),
        "gradients": _storage_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer_state": _storage_bytes(state),
    }


def activation_terms(config: GPTConfig, batch: int, seq_len: int) -> dict[str, int]:
    """Bytes that the forward pass keeps for backward, by what keeps them."""
    C, H, V, L = config.width, config.heads, config.vocab_size, config.layers
    H_D, KV_D = H * config.head_width, config.kv_heads * config.head_width
    of_heads = 2 * (H_D + KV_D) + H + config.kv_heads if config.head_norms else 0
    of_branches = 2 * (2 * C + 1) if config.post_norms else 0
    more_norms = L * (of_heads + of_branches)  # the input, normalised; 1/rms
    per_token = {  # numbers, each a float32
        "residual_stream": C + 2 * L * C,  # the embedding, and the sums after attention and MLP
        "norms": (2 * L + 1) * (2 * C + 1) + more_norms,  # normalised, then weighted; 1/rms
        "attention": L * (H_D + 2 * KV_D + H_D + H),  # q, k, v; the output; log-sum-exp
        "mlp": L * 4 * config.hidden,  # gate, silu(gate), up, their product
        "logits": V,  # as log-probabilities
    }
    tokens = batch * seq_len
    terms = {name: FLOAT32 * tokens * numbers for name, numbers in per_token.items()}
    return terms | {"loss": FLOAT32}


def activation_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Bytes that the forward pass keeps for backward."""
    return sum(activation_terms(config, batch, seq_len).values())


def start_of_backward_terms(config: GPTConfig, batch: int, seq_len: int) -> dict[str, int]:
    """Bytes alive when backward has just begun, from the second step on, by category."""
    N, V, tokens = config.parameters, config.vocab_size, batch * seq_len
    angles = config.seq_len * config.head_width // 2  # rotary positions: of all that there can be
    return {
        "parameters": FLOAT32 * N,
        "buffers": 2 * FLOAT32 * angles,
        "optimizer_state": 2 * FLOAT32 * N + FLOAT32 * _weight_tensors(config),
        "inputs": 2 * INT64 * tokens,
        "activations": activation_bytes(config, batch, seq_len),
        # The gradient of the loss, of the log-probabilities and, made from it, of the logits.
        "backward_temporaries": FLOAT32 + 2 * FLOAT32 * tokens * V,
    }


def start_of_backward_bytes(config: GPTConfig, batch: int, seq_len: int) -> int:
    """Bytes alive when backward has just begun: the peak of a step with many tokens."""
    return sum(start_of_backward_terms(config, batch, seq_len).values())


def largest_batch(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    """The most sequences that fit into the budget; 0 if not even one does.

    `bytes_at(batch)` gives the bytes that a batch takes, by formula or by measuring it; it may be
    any function that never falls. It is called about 2·log₂(result) times.
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
    """How many tensors the weights are: AdamW counts its steps for each."""
    more = len(set(config.attention_biases))
    more += 2 * (config.head_norms + config.post_norms)
    return (9 + more) * config.layers + (2 if config.tied else 3)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(nested: Any) -> list[torch.Tensor]:
    """All tensors in an optimizer's state, however deep."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = list(nested.values())
    if isinstance(nested, (list, tuple)):
        return [tensor for part in nested for tensor in _tensors(part)]
    return []
