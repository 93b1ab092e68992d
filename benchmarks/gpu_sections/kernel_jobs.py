"""memlab's Triton kernels against production kernels, and against the limits of the GPU.

The limits are measured: the bandwidth of a copy, and the FLOP/s of a large bfloat16 matmul. They
bound the time of a kernel from below, by the bytes it moves or its operations.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab import losses
from memlab.attention import attention_reference

from .optim_jobs import NO_PEER, _of_bitsandbytes

Answer = dict[str, Any]
Run = Callable[[], object]

BYTES, OPERATIONS = "bytes", "operations"
TO_PEER, TO_LIMIT, GOAL = "time / peer", "time / GPU limit", "goal"
HALF = torch.bfloat16
SMALL_COPY, LARGE_COPY = 2**16, 2**30  # bytes
SMALL_MATMUL, LARGE_MATMUL = 64, 8192  # rows and columns


def kernels() -> ModuleType:
    """Import memlab.kernels, which requires Triton; a rehearsal uses Triton's interpreter."""
    import memlab.kernels

    return memlab.kernels


@dataclass(frozen=True)
class Race:
    """A kernel, its production peer, and its work."""

    what: str
    ours: Run
    peer: Run
    kind: str  # the limit that applies: BYTES or OPERATIONS
    amount: float
    error: Callable[[], float]  # of memlab's kernel
    error_unit: str
    peer_name: str
    goal: float  # time ratio to the peer


Made = Callable[[str, bool], Race]  # made(device, small)


# ------------------------------------------------------------------ attention


def attention(backward: bool, causal: bool, width: int, device: str, small: bool) -> Race:
    """Time attention with four query heads per key head; the peer is torch's flash kernel."""
    heads, kv_heads, tokens = (4, 1, 128) if small else (32, 8, 4096)
    draw = partial(torch.randn, device=device, dtype=HALF)
    q = draw(1, heads, tokens, width).requires_grad_()
    k, v = (draw(1, kv_heads, tokens, width).requires_grad_() for _ in range(2))
    ours = partial(kernels().flash_attention, causal=causal)
    peer = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    matmuls = 7 if backward else 2  # 2 forward; 5 backward, including recomputed scores
    operations = matmuls * 2 * heads * tokens**2 * width / (2 if causal else 1)
    return Race(
        f"{heads} heads of {width}, {kv_heads} of keys, {tokens:,} tokens",
        _run(ours, (q, k, v), backward),
        _run(_by_flash(peer, device), (q, k, v), backward),
        OPERATIONS,
        operations,
        lambda: _error_over(ours, partial(attention_reference, causal=causal), (q, k, v)),
        "× the reference's error",
        "torch's flash attention",
        goal=1.5,
    )


def _by_flash(peer: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    if device == "cpu":
        return peer

    def forced(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return peer(*inputs)

    return forced


def _run(way: Callable[..., Tensor], inputs: tuple[Tensor, ...], backward: bool) -> Run:
    if not backward:
        return torch.no_grad()(lambda: way(*inputs))
    upstream = torch.ones_like(way(*inputs))
    return lambda: torch.autograd.grad(way(*inputs), inputs, upstream)


def _error_over(ours: Any, reference: Any, inputs: tuple[Tensor, ...]) -> float:
    """Return the error on 128 tokens, relative to the reference's error at the same precision."""
    few = [x.detach()[:, :, :128].requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in few]

    def all_of(way: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        result = way(*given)
        return [result, *torch.autograd.grad(result.square().sum(), given)]

    wanted = all_of(reference, exact)
    errors = [
        max(
            (a - b).abs().max() / b.abs().max()
            for a, b in zip(all_of(way, few), wanted, strict=True)
        )
        for way in (ours, reference)
    ]
    return (errors[0] / errors[1]).item()


# ------------------------------------------------------------------ optimizers


def optimizer(name: str, dtype: torch.dtype, device: str, small: bool) -> Race:
    """Time a step of one weight; the peer is bitsandbytes' kernel."""
    count = 2**14 if small else 2**26
    moments = {"Adam8bit": 2, "Lion8bit": 1}[name]
    generator = torch.Generator(device).manual_seed(0)
    gradient = torch.randn(count, device=device, generator=generator).to(dtype)
    runs = []
    for made in (getattr(kernels(), name), _of_bitsandbytes(name)):
        weight = nn.Parameter(torch.zeros(count, device=device, dtype=dtype))
        weight.grad = gradient
        runs.append(made([weight], lr=1e-3, weight_decay=0.0).step)
    per_weight = 3 * dtype.itemsize + moments * (2 + 8 / 256)  # bytes read and written
    return Race(
        f"{count:,} weights of {str(dtype).removeprefix('torch.')}",
        *runs,
        BYTES,
        count * per_weight,
        partial(_codes_that_differ, name, dtype, device),
        "of 8-bit codes differ",
        "bitsandbytes'",
        goal=1.1,
    )


def _codes_that_differ(name: str, dtype: torch.dtype, device: str) -> float:
    """Return the share of 8-bit codes that differ from memlab's CPU optimizer after ten steps."""
    from memlab import optim

    kept = []
    for made in (getattr(kernels(), name), getattr(optim, name)):
        generator = torch.Generator(device).manual_seed(0)
        weight = nn.Parameter(torch.zeros(2**14, device=device, dtype=dtype))
        stepped = made([weight], lr=1e-3)
        for _ in range(10):
            weight.grad = torch.randn(2**14, device=device, generator=generator).to(dtype)
            stepped.step()
        codes = [x for key, x in stepped.state[weight].items() if key.endswith("_codes")]
        kept.append(torch.cat(codes))
    return (kept[0] != kept[1]).double().mean().item()


# ------------------------------------------------------------------ activations


def coding(decodes: bool, bits: int, device: str, small: bool) -> Race:
    """Time encoding or decoding of bfloat16 activations; the peer copies as many bytes.

    Below 8 bits, rounding is stochastic, as in `compressed_activations`.
    """
    count = 2**14 if small else 2**28
    x = torch.randn(count, device=device, dtype=HALF)
    encode = partial(kernels().quantize_affine, x, bits=bits)
    encode = partial(encode, mode="nearest" if bits == 8 else "stochastic")
    kept = encode()
    moved = x.nbytes + kept.nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = partial(kernels().dequantize_affine, kept) if decodes else encode
    return Race(
        f"{count:,} bfloat16 elements in {bits} bits",
        run,
        lambda: target.copy_(source),
        BYTES,
        moved,
        partial(_coding_differs, bits, device),
        "of elements differ",
        "a copy",
        goal=1 / 0.8,  # 80 % of a copy's bandwidth
    )


def _coding_differs(bits: int, device: str) -> float:
    """Return the share of decoded elements that differ from `memlab.quantize`."""
    from memlab.quantize import dequantize_blockwise, quantize_blockwise

    x = torch.randn(10_000, device=device, dtype=HALF)
    ours = kernels().dequantize_affine(kernels().quantize_affine(x, bits=bits))
    theirs = dequantize_blockwise(quantize_blockwise(x, bits=bits))
    return (ours != theirs).double().mean().item()


# ------------------------------------------------------------------ the loss


def loss(device: str, small: bool) -> Race:
    """Time the chunked loss, forward and backward; the peer computes all logits at once."""
    tokens, width, vocab_size = (64, 32, 512) if small else (8192, 4096, 128_256)
    hidden = torch.randn(tokens, width, device=device, dtype=HALF).requires_grad_()
    weight = torch.randn(vocab_size, width, device=device) / width**0.5
    weight = weight.to(HALF).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,), device=device)

    def naive(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return kernels().chunked_cross_entropy(hidden, weight, targets)

    def reference(hidden: Tensor, weight: Tensor) -> Tensor:
        return losses.cross_entropy_reference(hidden, weight, targets)

    inputs = (hidden, weight)
    return Race(
        f"{tokens:,} tokens, hidden size {width:,}, vocabulary {vocab_size:,}",
        _run(ours, inputs, True),
        _run(naive, inputs, True),
        OPERATIONS,
        3 * 2 * tokens * width * vocab_size,
        partial(_loss_error, ours, reference, inputs),
        "of absmax",
        "all logits",
        goal=1.0,
    )


def _loss_error(ours: Any, reference: Any, inputs: tuple[Tensor, Tensor]) -> float:
    """Return the largest difference of loss and gradients, relative to absmax."""
    pairs = []
    for way in (ours, reference):
        result = way(*inputs)
        pairs.append([result.detach(), *torch.autograd.grad(result, inputs)])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*pairs, strict=True))


RACES: dict[str, Made] = {
    **{
        f"attention {direction}, {mask}, D = {width}": partial(attention, backward, causal, width)
        for width in (64, 128)
        for mask, causal in (("causal", True), ("full", False))
        for direction, backward in (("forward", False), ("forward and backward", True))
    },
    **{
        f"{name}, {str(dtype).removeprefix('torch.')}": partial(optimizer, name, dtype)
        for name in ("Adam8bit", "Lion8bit")
        for dtype in (torch.float32, HALF)
    },
    **{
        f"{word} {bits} bits": partial(coding, decodes, bits)
        for bits in (8, 4, 2)
        for word, decodes in (("encode", False), ("decode", True))
    },
    "loss in chunks": loss,
}


# ------------------------------------------------------------------ the job


def compare(name: str, small: bool, rehearsal: bool) -> Answer:
    """Compare a kernel with its peer; a rehearsal runs it in Triton's interpreter."""
    device = "cpu" if rehearsal else "cuda"
    torch.manual_seed(0)
    try:
        race = RACES[name](device, small or rehearsal)
    except ModuleNotFoundError as error:
        return {"failure": NO_PEER if error.name == "bitsandbytes" else str(error)}
    found: Answer = {"what": race.what, GOAL: race.goal, "error": race.error()}
    ours, theirs = seconds(race.ours, device), seconds(race.peer, device)
    limit = race.amount / rates(device, small or rehearsal)[race.kind]
    found |= {"error unit": race.error_unit, "peer": race.peer_name}
    found["milliseconds"] = 1e3 * ours
    found[TO_PEER] = ours / theirs
    found[TO_LIMIT] = ours / limit
    found["limit"] = race.kind
    found["temporary_bytes"] = _temporary_bytes(race.ours, device)
    return found


@cache
def rates(device: str, small: bool) -> dict[str, float]:
    """Measure bytes/s of a copy and FLOP/s of a matmul on this device."""
    count, size = (SMALL_COPY, SMALL_MATMUL) if small else (LARGE_COPY, LARGE_MATMUL)
    source, target = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(size, size, device=device).to(HALF) for _ in range(2))
    return {
        BYTES: 2 * count / seconds(lambda: target.copy_(source), device),
        OPERATIONS: 2 * size**3 / seconds(lambda: a @ b, device),
    }


def seconds(run: Run, device: str) -> float:
    """Return the median of many runs with a cold cache, or of three runs on a CPU."""
    run()
    if device == "cpu":
        return statistics.median(_wall_seconds(run) for _ in range(3))
    from triton.testing import do_bench

    return do_bench(run, warmup=50, rep=300, return_mode="median") / 1e3


def _wall_seconds(run: Run) -> float:
    from time import perf_counter

    start = perf_counter()
    run()
    return perf_counter() - start


def _temporary_bytes(run: Run, device: str) -> int | None:
    """Return the allocator's peak of a run beyond its inputs; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
