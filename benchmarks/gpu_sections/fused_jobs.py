"""Tiled attention and chunked loss against torch's and unfused versions: error, memory, time."""

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.attention import attention_reference, flash_attention
from memlab.cli.rows import time_in_turn
from memlab.losses import chunked_cross_entropy

Answer = dict[str, Any]
Way = Callable[..., Tensor]

DTYPE = torch.bfloat16
MEMLAB, TORCH, UNFUSED, PACKAGE = "memlab", "torch", "unfused", "flash-attn"


@dataclass(frozen=True)
class Problem:
    """Implementations to compare, and their arguments."""

    ways: Callable[[], dict[str, Way]]
    arguments: Callable[..., list[Tensor]]  # arguments(device, **sizes)
    small: dict[str, int]
    large: dict[str, int]


def attention_ways(causal: bool) -> dict[str, Way]:
    """Return the implementations; the flash-attn package's where it and a GPU are there."""
    ways: dict[str, Way] = {
        MEMLAB: partial(flash_attention, causal=causal, tile=1024),
        TORCH: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        UNFUSED: partial(attention_reference, causal=causal),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("flash_attn"):
        flash_attn_func = importlib.import_module("flash_attn").flash_attn_func

        ways[PACKAGE] = by_heads(partial(flash_attn_func, causal=causal))
    return ways


def by_heads(of_package: Way) -> Way:
    """Return a function of (B, H, T, D) for one of the flash-attn package's (B, T, H, D)."""
    return lambda *qkv: of_package(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)


def queries_keys_values(device: str, heads: int, tokens: int, width: int) -> list[Tensor]:
    shape = (1, heads, tokens, width)
    return [torch.randn(shape, device=device, dtype=DTYPE) for _ in range(3)]


def loss_ways() -> dict[str, Way]:
    ways: dict[str, Way] = {MEMLAB: chunked_cross_entropy, UNFUSED: by_all_logits}
    if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
        ways[TORCH] = F.linear_cross_entropy
    return ways


def by_all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def hidden_weight_targets(device: str, tokens: int, width: int, vocab_size: int) -> list[Tensor]:
    hidden = torch.randn(tokens, width, device=device, dtype=DTYPE)
    weight = (torch.randn(vocab_size, width, device=device) / width**0.5).to(DTYPE)
    return [hidden, weight, torch.randint(vocab_size, (tokens,), device=device)]


PROBLEMS = {
    "causal attention": Problem(
        partial(attention_ways, True),
        queries_keys_values,
        {"heads": 2, "tokens": 128, "width": 64},
        {"heads": 16, "tokens": 8192, "width": 128},
    ),
    "full attention": Problem(
        partial(attention_ways, False),
        queries_keys_values,
        {"heads": 2, "tokens": 128, "width": 64},
        {"heads": 16, "tokens": 8192, "width": 128},
    ),
    "loss": Problem(
        loss_ways,
        hidden_weight_targets,
        {"tokens": 64, "width": 32, "vocab_size": 512},
        {"tokens": 8192, "width": 4096, "vocab_size": 128_256},
    ),
}


def compare(name: str, small: bool, rehearsal: bool) -> Answer:
    """Compare implementations of one problem in bfloat16; a rehearsal runs on the CPU."""
    device, problem = "cpu" if rehearsal else "cuda", PROBLEMS[name]
    sizes = problem.small if small or rehearsal else problem.large
    torch.manual_seed(0)
    few = problem.arguments(device, **problem.small)
    many = problem.arguments(device, **sizes)
    ways = problem.ways()
    found: Answer = {"what": ", ".join(f"{n.replace('_', ' ')} {x:,}" for n, x in sizes.items())}
    errors = {who: _error(way, few, ways[UNFUSED]) for who, way in ways.items()}
    for who, way in ways.items():
        found[f"{who}, error / unfused"] = errors[who] / errors[UNFUSED]
        found[f"{who}, temporary_bytes"] = _temporary_bytes(way, many)
    warm = {who: _warm(way, many) for who, way in ways.items()}
    for other in ways.keys() - {MEMLAB}:
        rounds = time_in_turn(warm[MEMLAB], warm[other])
        found[f"time / {other}"] = statistics.median(ours / it for ours, it in rounds)
    return found


def _forward_backward(way: Way, arguments: list[Tensor]) -> list[Tensor]:
    """Return the result, and the gradients of all floating-point arguments."""
    given = [x.detach().requires_grad_(x.is_floating_point()) for x in arguments]
    result = way(*given)
    wanted = [x for x in given if x.requires_grad]
    return [result.detach(), *torch.autograd.grad(result.square().sum(), wanted)]


def _error(way: Way, arguments: list[Tensor], exact: Way) -> float:
    """Return the largest error of result and gradients, relative to absmax, against float64."""
    precise = [x.double() if x.is_floating_point() else x for x in arguments]
    pairs = zip(_forward_backward(way, arguments), _forward_backward(exact, precise), strict=True)
    return max(((got - it).abs().max() / it.abs().max()).item() for got, it in pairs)


def _temporary_bytes(way: Way, arguments: list[Tensor]) -> int | None:
    """Return the allocator's peak beyond the arguments; None on a CPU."""
    if not arguments[0].is_cuda:
        return None
    _forward_backward(way, arguments)  # allocates matmul workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _forward_backward(way, arguments)
    return torch.cuda.max_memory_allocated() - before


def _warm(way: Way, arguments: list[Tensor]) -> Callable[[], object]:
    run = partial(_forward_backward, way, arguments)
    for _ in range(3):
        run()
    return run
