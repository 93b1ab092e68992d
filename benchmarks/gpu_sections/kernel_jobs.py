"""Kernels of memlab beside those of production, and beside what the card can do at all.

What the card can do is measured on it: how many bytes a second a copy moves, and how many
operations a second a product of large bfloat16 matrices does. A kernel that has so many bytes to
move, or so many operations to do, cannot be faster than that.
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
TO_PEER, TO_LIMIT, AIM = "time over its peer's", "time over the card's limit", "aim"
HALF = torch.bfloat16
SMALL_COPY, LARGE_COPY = 2**16, 2**30  # bytes
SMALL_PRODUCT, LARGE_PRODUCT = 64, 8192  # rows and columns


def kernels() -> ModuleType:
    """memlab.kernels, where Triton is; a rehearsal needs its interpreter."""
    import memlab.kernels

    return memlab.kernels


@dataclass(frozen=True)
class Race:
    """A kernel, what production has in its place, and what the card has to do for it."""

    what: str
    ours: Run
    peer: Run
    kind: str  # which limit it meets: bytes to move, or operations to do
    amount: float
    error: Callable[[], float]  # of ours
    error_of: str  # what that is
    rival: str  # whose the peer is
    aim: float  # the time over the peer's that is aimed at


Made = Callable[[str, bool], Race]  # on a device; small


# ------------------------------------------------------------------ attention


def attention(backward: bool, causal: bool, width: int, device: str, small: bool) -> Race:
    """Grouped queries, four to a key; the peer is torch's flash kernel."""
    heads, kv_heads, tokens = (4, 1, 128) if small else (32, 8, 4096)
    draw = partial(torch.randn, device=device, dtype=HALF)
    q = draw(1, heads, tokens, width).requires_grad_()
    k, v = (draw(1, kv_heads, tokens, width).requires_grad_() for _ in range(2))
    ours = partial(kernels().flash_attention, causal=causal)
    peer = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    products = 7 if backward else 2  # 2 forward; 5 in backward, of which one is the scores again
    operations = products * 2 * heads * tokens**2 * width / (2 if causal else 1)
    return Race(
        f"{heads} heads of {width}, {kv_heads} of keys, {tokens:,} tokens",
        _passed(ours, (q, k, v), backward),
        _passed(_by_flash(peer, device), (q, k, v), backward),
        OPERATIONS,
        operations,
        lambda: _error_over(ours, partial(attention_reference, causal=causal), (q, k, v)),
        "of the readable version's error",
        "torch's flash attention",
        aim=1.5,
    )


def _by_flash(peer: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    if device == "cpu":
        return peer

    def forced(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return peer(*inputs)

    return forced


def _passed(way: Callable[..., Tensor], inputs: tuple[Tensor, ...], backward: bool) -> Run:
    if not backward:
        return torch.no_grad()(lambda: way(*inputs))
    upstream = torch.ones_like(way(*inputs))
    return lambda: torch.autograd.grad(way(*inputs), inputs, upstream)


def _error_over(ours: Any, reference: Any, inputs: tuple[Tensor, ...]) -> float:
    """The error of 128 tokens by float64, in that of the readable version at the same precision."""
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
    """A step of one weight; the peer is bitsandbytes' own kernel."""
    count = 2**14 if small else 2**26
    moments = {"Adam8bit": 2, "Lion8bit": 1}[name]
    generator = torch.Generator(device).manual_seed(0)
    gradient = torch.randn(count, device=device, generator=generator).to(dtype)
    runs = []
    for made in (getattr(kernels(), name), _of_bitsandbytes(name)):
        weight = nn.Parameter(torch.zeros(count, device=device, dtype=dtype))
        weight.grad = gradient
        runs.append(made([weight], lr=1e-3, weight_decay=0.0).step)
    a_weight = 3 * dtype.itemsize + moments * (2 + 8 / 256)  # read and written, and read
    return Race(
        f"{count:,} weights of {str(dtype).removeprefix('torch.')}",
        *runs,
        BYTES,
        count * a_weight,
        partial(_codes_that_differ, name, dtype, device),
        "of the codes differ",
        "bitsandbytes'",
        aim=1.1,
    )


def _codes_that_differ(name: str, dtype: torch.dtype, device: str) -> float:
    """The share of codes that are not the readable optimizer's, after ten steps."""
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
    """Encoding, or decoding, bfloat16 activations; the peer is a copy of as many bytes. Below 8
    bits they are rounded at random, as `compressed_activations` has it."""
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
        f"{count:,} numbers of bfloat16 in {bits} bits",
        run,
        lambda: target.copy_(source),
        BYTES,
        moved,
        partial(_coding_differs, bits, device),
        "of the numbers differ",
        "a copy",
        aim=1 / 0.8,  # 80 % of a copy's bandwidth
    )


def _coding_differs(bits: int, device: str) -> float:
    """The share of numbers that come back other than from the readable version."""
    from memlab.quantize import dequantize_blockwise, quantize_blockwise

    x = torch.randn(10_000, device=device, dtype=HALF)
    ours = kernels().dequantize_affine(kernels().quantize_affine(x, bits=bits))
    theirs = dequantize_blockwise(quantize_blockwise(x, bits=bits))
    return (ours != theirs).double().mean().item()


# ------------------------------------------------------------------ the loss


def loss(device: str, small: bool) -> Race:
    """Forward and backward of the head's loss in chunks; the peer makes all logits at once."""
    tokens, width, vocab_size = (64, 32, 512) if small else (8192, 4096, 128_256)
    hidden = torch.randn(tokens, width, device=device, dtype=HALF).requires_grad_()
    weight = torch.randn(vocab_size, width, device=device) / width**0.5
    weight = weight.to(HALF).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,), device=device)

    def naive(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return kernels().chunked_cross_entropy(hidden, weight, targets)

    def readable(hidden: Tensor, weight: Tensor) -> Tensor:
        return losses.cross_entropy_reference(hidden, weight, targets)

    inputs = (hidden, weight)
    return Race(
        f"{tokens:,} tokens, {width:,} wide, {vocab_size:,} words",
        _passed(ours, inputs, True),
        _passed(naive, inputs, True),
        OPERATIONS,
        3 * 2 * tokens * width * vocab_size,
        partial(_loss_error, ours, readable, inputs),
        "of the largest number",
        "all logits",
        aim=1.0,
    )


def _loss_error(ours: Any, readable: Any, inputs: tuple[Tensor, Tensor]) -> float:
    """The largest difference of the two's losses and gradients, in shares of the largest number."""
    pairs = []
    for way in (ours, readable):
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


# ------------------------------------------------------------------ the answer


def beside_its_peer(name: str, small: bool, rehearsal: bool) -> Answer:
    """All that is known of one kernel; a rehearsal runs it in Triton's interpreter."""
    device = "cpu" if rehearsal else "cuda"
    torch.manual_seed(0)
    try:
        race = RACES[name](device, small or rehearsal)
    except ModuleNotFoundError as error:
        return {"failure": NO_PEER if error.name == "bitsandbytes" else str(error)}
    found: Answer = {"what": race.what, AIM: race.aim, "error": race.error()}
    ours, theirs = seconds(race.ours, device), seconds(race.peer, device)
    limit = race.amount / rates(device, small or rehearsal)[race.kind]
    found |= {"error of": race.error_of, "peer": race.rival}
    found["milliseconds"] = 1e3 * ours
    found[TO_PEER] = ours / theirs
    found[TO_LIMIT] = ours / limit
    found["limit"] = race.kind
    found["on the way_bytes"] = _bytes_on_the_way(race.ours, device)
    return found


@cache
def rates(device: str, small: bool) -> dict[str, float]:
    """Bytes and operations a second that this card does, by a copy and by a product."""
    count, size = (SMALL_COPY, SMALL_PRODUCT) if small else (LARGE_COPY, LARGE_PRODUCT)
    source, target = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(size, size, device=device).to(HALF) for _ in range(2))
    return {
        BYTES: 2 * count / seconds(lambda: target.copy_(source), device),
        OPERATIONS: 2 * size**3 / seconds(lambda: a @ b, device),
    }


def seconds(run: Run, device: str) -> float:
    """The median of many runs, each with a cold cache; on a CPU, of three."""
    run()
    if device == "cpu":
        return statistics.median(_by_the_clock(run) for _ in range(3))
    from triton.testing import do_bench

    return do_bench(run, warmup=50, rep=300, return_mode="median") / 1e3


def _by_the_clock(run: Run) -> float:
    from time import perf_counter

    start = perf_counter()
    run()
    return perf_counter() - start


def _bytes_on_the_way(run: Run, device: str) -> int | None:
    """The most that a run takes beyond what is there, by the allocator; on a GPU alone."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
