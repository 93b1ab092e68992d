"""Day 9: eight-bit Adam."""

from collections.abc import Callable, Iterator
from functools import cache
from math import log10
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.course.bill_steps import momentum_in_8_bits
from memlab.course.exercises import Bill, Day, Wrong, distinct, require
from memlab.course.properties import (
    furthest,
    increasing,
    is_tensor,
    is_tuple,
    keep_no_more,
    named_errors,
    require_none_wrong,
    same_block_maxima,
    storage_bytes,
)
from memlab.course.solutions import checked
from memlab.metering import measure
from memlab.reference.adam8bit import Adam8bit, dynamic_code, encode, encode_positive

BLOCK = 256
SMALLEST = 4096  # weights with fewer elements keep float32 moments
_LIBRARIES = ("memlab.quantize", "memlab.optim", "bitsandbytes", "torchao")

Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class NearestCodeAdam(Adam8bit):
    """Adam8bit as in 9.3: small second moments become 0. 9.4 prevents that."""

    encode_v = staticmethod(encode)


# ------------------------------------------------------------------ 9.1: the dynamic codebook


def _check_code(answer: Callable[[bool], Tensor]) -> str:
    for signed in (True, False):
        call = f"dynamic_code(signed={signed})"
        got = answer(signed)
        is_tensor(call, got, dtype=torch.float32, shape=(256,))
        increasing(call, got)
        _require_entries(call, got, dynamic_code(signed))
    return (
        "2 × 256 entries, bitwise equal to bitsandbytes' · zero is entry 127 with signs, entry 0 "
        "without"
    )


def _require_entries(call: str, got: Tensor, wanted: Tensor) -> None:
    off = ~((got - wanted).abs() <= 1e-6 * wanted.abs())
    require_none_wrong(call, got, wanted, off)
    if off.any():
        return
    count = (got != wanted).sum().item()
    require(
        not count,
        f"{call}: {count} of 256 entries differ from bitsandbytes' codebook in their last bits.",
    )


# ------------------------------------------------------------------ 9.2: a block quantizer

MOST_BYTES = 64  # of temporaries, per element


def _encode_cases() -> dict[str, tuple[Tensor, Tensor]]:
    """Tensors and codebooks, small tensors first."""
    signed, unsigned = dynamic_code(True), dynamic_code(False)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    uneven = normal(3, BLOCK) * torch.tensor([[1.0], [1e-4], [300.0]])
    zeros, tiny = torch.zeros(BLOCK), torch.rand(BLOCK, generator=random).add(0.1)
    return {
        "[0.5, −2.0, 0.01, 0.0]": (torch.tensor([0.5, -2.0, 0.01, 0.0]), signed),
        "256 elements": (normal(BLOCK), signed),
        "3 blocks of different scales, (3, 256)": (uneven, signed),
        "a block of elements and a block of zeros": (torch.cat([normal(256), zeros]), signed),
        "256 squares, unsigned": (normal(BLOCK) ** 2, unsigned),
        "256 squares, all below 10⁻¹⁹": (1e-20 * normal(BLOCK) ** 2, unsigned),
        "256 elements below 10⁻³³, unsigned": (1e-34 * tiny, unsigned),
        "a block of squares and a block of zeros": (torch.cat([normal(256) ** 2, zeros]), unsigned),
        "300 elements": (0.1 * normal(300), signed),
        "a non-contiguous matrix, (5, 64)": (normal(64, 5).mT, signed),
        "3 × 700 elements over many decades": ((3 * normal(3, 700)).exp(), unsigned),
    }


def _check_encode(answer: Encode) -> str:
    for name, (x, code) in _encode_cases().items():
        call = f"encode of {name}"
        codes, scales = _encoded(call, answer, x, code)
        same_block_maxima(call, "scale", scales, x, BLOCK)
        _require_nearest(call, x, codes, scales, code)
        _require_zeros(call, x, codes, code)
    x, code = torch.linspace(-1, 1, 2**14), dynamic_code(True)
    per_element = measure(lambda: answer(x, code)).peak_bytes / x.numel()
    require(
        per_element <= MOST_BYTES,
        f"encode needs {per_element:,.0f} bytes per element at its peak; wanted at most "
        f"{MOST_BYTES}.",
    )
    return (
        f"each element gets the nearest code · 300 elements in 308 bytes · zeros get the code of "
        f"zero · at most {MOST_BYTES} bytes per element at the peak"
    )


def _encoded(call: str, answer: Encode, x: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the right types and shapes. x and code are unchanged."""
    mine, mine_code = x.clone(), code.clone()
    with named_errors(call, when=x.numel() % BLOCK != 0):  # a short last block
        got = answer(mine, mine_code)
    is_tuple(call, got, 2, "codes and scales")
    count = x.numel()
    is_tensor(f"{call}, codes,", got[0], dtype=torch.uint8, shape=(count,))
    is_tensor(f"{call}, scales,", got[1], dtype=torch.float32, shape=(-(-count // BLOCK),))
    require(torch.equal(mine, x) and torch.equal(mine_code, code), f"{call} changed its arguments.")
    keep_no_more(call, got)
    return got


def _require_nearest(call: str, x: Tensor, codes: Tensor, scales: Tensor, code: Tensor) -> None:
    """By distance, in float64. At a tie, both neighbors are right."""
    flat, exact = x.flatten().double(), code.double()
    each = scales.double().repeat_interleave(BLOCK)[: len(flat)]
    got = exact[codes.long()] * each
    nan = (~got.isfinite()).sum().item()
    require(not nan, f"{call}: {nan} elements decode to NaN or infinity.")
    nearest = exact[(flat.view(-1, 1) - exact * each.view(-1, 1)).abs().argmin(1)] * each
    further = (got - flat).abs() - (nearest - flat).abs()
    off = (further > 1e-5 * flat.abs()).nonzero().flatten().tolist()
    for k in off[:1]:
        mine, right = distinct(got[k].item(), nearest[k].item())
        require(
            False,
            f"{call}: {flat[k]:.4g} decodes to {mine}; wanted {right}. {len(off)} of {len(flat)} "
            f"elements are wrong.",
        )


def _require_zeros(call: str, x: Tensor, codes: Tensor, code: Tensor) -> None:
    """Where the scale is 0, any code decodes to 0, but 9.4 reads the codes."""
    wanted = code.abs().argmin().item()
    off = codes[(x.flatten() == 0) & (codes != wanted)]
    require(
        not len(off),
        f"{call}: {len(off)} zeros should get code {wanted}, but the first of them gets "
        f"{off[:1].sum()}.",
    )


# ------------------------------------------------------------------ 9.3: Adam

LR, STEPS = 0.01, 6
MOST_VALUES = 32  # in a state outside of its tensors, names included
SETTINGS = {"lr": LR, "betas": (0.8, 0.9), "eps": 1e-3}
SHAPES = {"(64, 80)": (64, 80), "(37, 139)": (37, 139), "(4095,)": (4095,), "(4096,)": (4096,)}


def _check_adam(answer: type[torch.optim.Optimizer]) -> str:
    for name, shape in SHAPES.items():
        call = f"Adam8bit on a weight {name}"
        got, held, calls = _stepped(answer, call, shape)
        wanted, _, _ = _reference_steps(shape)
        _require_first_step(call, got[0], wanted[0])
        _require_state_bytes(call, shape, held)
        _require_steps(call, got, wanted)
        wanted_calls = STEPS if torch.Size(shape).numel() >= SMALLEST else 0
        require(
            calls == wanted_calls,
            f"{call}: in {STEPS} steps self.encode_v was called {calls} times; wanted "
            f"{wanted_calls}.",
        )
    _check_groups(answer)
    return (
        f"{STEPS} steps are right, for {len(SHAPES)} shapes and for two parameter groups · state "
        f"2n + 8⌈n/256⌉ bytes from n = {SMALLEST:,}, 8n below · also with a short last block"
    )


def _check_groups(answer: type[torch.optim.Optimizer]) -> None:
    """Several weights in one optimizer, one of them not contiguous. Each group has its own
    settings, and the defaults are different."""
    got, wanted = _stepped_in_groups(answer), _stepped_in_groups(NearestCodeAdam)
    for (name, weight), right in zip(got.items(), wanted.values(), strict=True):
        share = _share_wrong(weight, right)
        require(
            share < 0.01,
            f"Adam8bit of three weights in two groups: after {STEPS} steps {share:.0%} of the "
            f"elements of {name} are wrong.",
        )


def _stepped_in_groups(answer: Any) -> dict[str, Tensor]:
    weights = {
        "weight 0, (40,) in group 0": torch.zeros(40),
        "weight 1, (80, 64) and not contiguous, in group 0": torch.zeros(64, 80).mT,
        "weight 2, (50,) in group 1, with another lr, betas and eps": torch.zeros(50),
    }
    a, b, c = (weight.requires_grad_() for weight in weights.values())
    own = {"params": [c], "lr": 3 * LR, "betas": (0.5, 0.7), "eps": 1e-2}
    optimizer = answer([{"params": [a, b], **SETTINGS}, own])
    gradients = {weight: _gradients(tuple(weight.shape)) for weight in (a, b, c)}
    for n in range(STEPS):
        for weight, of_weight in gradients.items():
            weight.grad = of_weight[n]
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _gradients(shape: tuple[int, ...]) -> list[Tensor]:
    """Of many sizes, below and above eps. The first 8 elements are always zero."""
    random = torch.Generator().manual_seed(0)
    size = torch.randn(shape, generator=random).exp() * 3e-3
    size.view(-1)[:8] = 0
    return [torch.randn(shape, generator=random) * size for _ in range(STEPS)]


def _stepped(answer: Any, call: str, shape: tuple[int, ...]) -> tuple[list[Tensor], int, int]:
    """The weight after each step, the bytes of state at the end, and the calls of encode_v."""
    weight, gradients = nn.Parameter(torch.zeros(shape)), _gradients(shape)
    before = weight.detach()  # keeps the storage alive, so that its address is not reused
    optimizer = answer([weight], **SETTINGS)
    calls = _counted_calls(optimizer)
    after: list[Tensor] = []

    def run() -> None:
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
            after.append(weight.detach().clone())

    trace = measure(run)
    require(
        all(map(torch.equal, gradients, _gradients(shape))), f"{call}: step changed the gradient."
    )
    require(
        any(copy.any() for copy in after) and weight.data_ptr() == before.data_ptr(),
        f"{call}: the weight was not changed in place. Write weight -= ….",
    )
    held = sum(e.bytes for e in trace.alive() if e.phase != "before")
    in_state = _state_bytes(call, optimizer.state[weight])
    return after, max(held - sum(copy.nbytes for copy in after), in_state), len(calls)


@cache
def _reference_steps(shape: tuple[int, ...]) -> tuple[list[Tensor], int, int]:
    return _stepped(NearestCodeAdam, "NearestCodeAdam", shape)


def _counted_calls(optimizer: Any) -> list[int]:
    """A list that grows by one with each call of the optimizer's encode_v."""
    kind = type(optimizer).__name__
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    require(is_optimizer, f"Adam8bit([weight], …) gave {kind}; wanted an optimizer.")
    encode_v: Any = getattr(optimizer, "encode_v", None)
    calls: list[int] = []
    require(
        callable(encode_v), "Adam8bit has no encode_v. Do not change the lines around your code."
    )

    def counted(x: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return encode_v(x, code)

    optimizer.encode_v = counted
    return calls


def _state_bytes(call: str, state: Any) -> int:
    """Bytes of the state's tensors. Everything else must be a few plain values."""
    leaves = list(_leaves(state))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    strange = [leaf for leaf in others if not _is_plain(leaf)]
    if strange:
        raise Wrong(
            f"{call} has an object of type {type(strange[0]).__name__} in its state; wanted "
            f"tensors, and plain numbers such as the step count."
        )
    require(
        len(others) <= MOST_VALUES,
        f"{call} has {len(others):,} values in its state outside of tensors; wanted at most "
        f"{MOST_VALUES}, such as the step count.",
    )
    return storage_bytes(tensors)


def _leaves(held: Any) -> Iterator[Any]:
    """The leaves of nested dicts, lists, tuples, sets and objects with attributes."""
    match held:
        case dict():
            parts = [*held, *held.values()]
        case list() | tuple() | set() | frozenset():
            parts = [*held]
        case _:
            parts = [] if callable(held) else [*getattr(held, "__dict__", {}).values()]
            if isinstance(held, Tensor) or not parts:
                yield held
    for part in parts:
        yield from _leaves(part)


def _is_plain(leaf: Any) -> bool:
    """None, a float, a 64-bit integer or a short string. Longer ones could hide moments."""
    match leaf:
        case int():
            return leaf.bit_length() <= 64
        case str():
            return len(leaf) <= 64
    return leaf is None or isinstance(leaf, float)


def _require_first_step(call: str, got: Tensor, wanted: Tensor) -> None:
    nans = got.isnan().sum().item()
    require(not nans, f"{call}: {nans:,} elements are NaN after the first step.")
    off = (got - wanted).abs().max().item() / LR
    require(
        off < 1e-3,
        f"{call}: the first step is wrong by up to {off:.3g} · lr. It should be the step of 32-bit "
        f"Adam, because all moments begin as zero.",
    )


def _require_state_bytes(call: str, shape: tuple[int, ...], held: int) -> None:
    n = torch.Size(shape).numel()
    wanted = 2 * n + 8 * -(-n // BLOCK) if n >= SMALLEST else 8 * n
    how = "2n + 8⌈n/256⌉" if n >= SMALLEST else "8n"
    slack = 64  # for a step count in a tensor
    require(
        wanted <= held <= wanted + slack,
        f"{call} of {n:,} elements: the state has {held:,} bytes after {STEPS} steps; wanted "
        f"{wanted:,}, {how}.",
    )


def _share_wrong(got: Tensor, wanted: Tensor) -> float:
    """The share of elements off by more than lr / 1000, or NaN."""
    is_right = (got - wanted).abs() <= 1e-3 * LR
    return 1 - is_right.float().mean().item()


def _require_steps(call: str, got: list[Tensor], wanted: list[Tensor]) -> None:
    """The last bit can decide between two codes, so 1 of 100 elements may differ."""
    for n, (a, b) in enumerate(zip(got, wanted, strict=True), start=1):
        share, off = _share_wrong(a, b), furthest(a, b) / LR
        require(
            share < 0.01,
            f"{call}: after step {n}, {share:.0%} of the elements are wrong by more than "
            f"lr / 1000, by up to {off:.1g} · lr.",
        )


# ------------------------------------------------------------------ 9.4: the rule

BOUND = 3.5  # no correct step within 100 steps is longer, in units of lr


def _check_rule(answer: Encode) -> str:
    unsigned = dynamic_code(False)
    random = torch.Generator().manual_seed(0)
    many = (4 * torch.randn(3 * BLOCK, generator=random)).exp()
    for name, x in {
        "[10⁻²⁰, 10⁻³⁰, 0.0]": torch.tensor([1e-20, 1e-30, 0.0]),
        "[1.0, 10⁻⁹, 0.0]": torch.tensor([1.0, 1e-9, 0.0]),
        "[10¹⁵, 10⁻³⁵, 0.0]": torch.tensor([1e15, 1e-35, 0.0]),  # their quotient underflows
        "[10⁻¹⁰, 10⁻⁴⁰, 0.0]": torch.tensor([1e-10, 1e-40, 0.0]),  # the second is subnormal
        "[3 · 10³⁸, 10⁻⁴⁵, 0.0]": torch.tensor([3e38, 1e-45, 0.0]),
        "[10⁻⁴⁰, 10⁻⁴⁵, 0.0]": torch.tensor([1e-40, 1e-45, 0.0]),
        "[1.0, halfway between codes 0 and 1, 0.0]": torch.tensor([1.0, unsigned[1] / 2, 0.0]),
        "256 zeros": torch.zeros(BLOCK),
        "3 × 256 elements over many decades": many,
        "700 elements, some of them 0": F.relu(many[:700] - 0.5),
        "10 × 70 elements, some of them 0": F.relu(many[:700] - 0.5).view(10, 70),
    }.items():
        call = f"encode_positive of {name}"
        codes, scales = _encoded(call, answer, x, unsigned)
        same_block_maxima(call, "scale", scales, x, BLOCK)
        _require_rule(call, x, codes, unsigned)
    longest, without = longest_step(answer), longest_step(encode)
    require(
        longest <= BOUND,
        f"with encode_positive the longest of 60 steps is {longest:.3g} · lr; wanted at most "
        f"{BOUND} · lr.",
    )
    return (
        f"positive elements never get code 0, zeros always do · the longest of 60 steps is below "
        f"{BOUND} · lr; without the rule it is above {10 ** int(log10(without)):,} · lr"
    )


def _require_rule(call: str, x: Tensor, codes: Tensor, code: Tensor) -> None:
    """The last bit can decide between two codes, so 1 of 100 elements may differ."""
    flat = x.flatten()
    lost = ((flat > 0) & (codes == 0)).sum().item()
    require(
        not lost,
        f"{call}: {lost} of {len(flat)} elements are positive but get code 0; wanted none.",
    )
    lifted = ((flat == 0) & (codes != 0)).sum().item()
    require(not lifted, f"{call}: {lifted} of {len(flat)} elements are zero but don't get code 0.")
    off = (codes.int() - encode_positive(x, code)[0].int()).abs()
    count = off.count_nonzero().item()
    require(
        off.max().item() <= 1 and count < 0.01 * len(flat),
        f"{call}: {count} of {len(flat)} elements with a nearest code above 0 get another code.",
    )


def longest_step(encode_v: Encode, n: int = 2 * SMALLEST, steps: int = 60) -> float:
    """In units of lr. Gradients differ by decades from element to element."""
    random = torch.Generator().manual_seed(0)
    size = (2 * torch.randn(n, generator=random)).exp()
    weight, lr, longest = nn.Parameter(torch.zeros(n)), 1e-3, 0.0
    optimizer: Any = Adam8bit([weight], lr=lr)
    optimizer.encode_v = encode_v
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = size * torch.randn(n, generator=random)
        optimizer.step()
        longest = max(longest, (weight.detach() - before).abs().max().item() / lr)
    return longest


# ------------------------------------------------------------------ the bill


DAY = Day(
    exercises=(
        checked("9.1", _check_code, dynamic_code, rebuilds=_LIBRARIES),
        checked("9.2", _check_encode, encode, rebuilds=_LIBRARIES),
        checked("9.3", _check_adam, NearestCodeAdam, rebuilds=_LIBRARIES),
        checked("9.4", _check_rule, encode_positive, rebuilds=_LIBRARIES),
    ),
    bill=Bill("day 9: Lion, 8-bit momentum", momentum_in_8_bits),
)
