"""Activation compression: keep what backward needs, but in eight bits.

Saves    of 4 bytes an activation all but 1.02: n numbers take n·bits/8 + 4·⌈n/256⌉ bytes.
Costs    a pass over each activation to encode it, one for each operator of backward that decodes
         it, and gradients that are off by some 0.5 % at 8 bits.
Source   Chen et al. 2021 (ActNN), arXiv 2104.14129; Liu et al. 2022 (GACT), arXiv 2206.11357.

Adds to memlab.reference.activation_compression: 4, 2 and 1 bits, stochastic rounding, masks and
ReLU outputs without error, tensors that several operators save, and a report.

The forward pass computes with exact numbers, so its values are to the bit those without. Only what
autograd puts aside is rounded, in groups of 256 numbers with a scale and an offset of their own: an
error is made once and not handed on from layer to layer.

To the nearest, an error at 8 bits is a 510th of its group's range at most. With fewer bits such
errors would pull a gradient to one side. Stochastic rounding is right in the mean, and as gradients
are linear in most of what is saved, so are they.

    floats with a gradient        bits a number: activations, and weights as autocast cast them
    the outputs of ReLU           the same, with a code for zero alone: is it zero is what backward
                                  asks, and one wrong answer in 300 is an error of 3 %
    bool                          one bit: the masks of masked_fill, of dropout on CUDA
    floats of two values          one bit, exact: the masks of dropout on a CPU, 0 and 1/(1 − p)
    weights                       as they are: they are alive anyway
    other floats                  as they are: data, buffers, frozen weights, the statistics of
      without a gradient          norms, the log-sum-exp of attention. Held elsewhere, or small
    one number a row              as they are: (…, 1), a factor of the whole row's gradient
    logarithms                    as they are: log-probabilities, log-sum-exps. Backward raises e to
                                  them, so an error of 0.1 would be a factor of 1.1
    small, integers, float64, …   as they are
    queries and keys              8 bits at least: fused attention makes its weights anew as
                                  exp(q·k − log-sum-exp), of the rounded q and k and the exact sum;
                                  at 2 bits gradients would be thousands of times too large

Masks are told by having been written to in place, as dropout does, and looked through to be sure.
What no rule can see: who divides by a number that was saved, as do the gradients of `log`, `sqrt`
and `/`; and who asks for its sign, as `abs`, `clamp` and `leaky_relu` do. Near zero a small error
is a large one there; `leave_alone` is for that.

Attention is torch's, or memlab's `flash_attention`; for another that is fused, below 8 bits, see
that `leave_alone` has its queries and keys.

Of two hooks the inner one counts. Around a checkpoint: its inputs are compressed, and what runs
again begins with what comes back of them (which `check="hash"` takes for a change). Inside of a
checkpoint: what is compressed is not forgotten.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memlab.internals.saved_tensors import Decode, Encode, Facts, encoded
from memlab.internals.torch_internals import FakeTensor
from memlab.quantize import (
    Mode,
    Quantized,
    dequantize_blockwise,
    pack,
    quantize_blockwise,
    unpack,
)
from memlab.units import format_bytes

# ------------------------------------------------------------------ the plan


class CodingKernel(NamedTuple):
    """Which two functions make numbers small and large again: a kernel can stand in for these."""

    encode: Callable[..., Quantized]  # the arguments of quantize_blockwise, but for a code
    decode: Callable[[Quantized], Tensor]


TORCH = CodingKernel(quantize_blockwise, dequantize_blockwise)

NUMBERS, RECTIFIED, ATTENDED = "activations", "outputs of ReLU", "queries and keys"
FLAGS, TWO_VALUES = "bool masks", "masks of two values"
WITHOUT_GRADIENT = "without a gradient"

# The results of attention: bounded, and gradients are linear in them.
_OF_ATTENTION = ("ScaledDotProduct", "SafeSoftmax", "Softmax", "FlashAttention")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kind_of(facts: Facts, min_numel: int, in_attention: bool = False) -> str:
    """What a storage holds. The kinds above are encoded, all others left alone."""
    if facts.is_weight:
        return "weights"
    if facts.numbers < min_numel:
        return "small"
    if facts.dtype == torch.bool:
        return FLAGS
    if facts.dtype not in _FLOATS:
        return str(facts.dtype).removeprefix("torch.")
    if not facts.requires_grad:
        return TWO_VALUES if facts.version else WITHOUT_GRADIENT
    if facts.shape[-1:] == (1,):
        return "one number a row"
    if facts.operator.startswith("Log"):  # LogSoftmaxBackward0, LogsumexpBackward0, LogBackward0
        return "logarithms"
    if in_attention and not facts.operator.startswith(_OF_ATTENTION):
        return ATTENDED
    return RECTIFIED if facts.operator == "ReluBackward0" else NUMBERS


# ------------------------------------------------------------------ masks


def pack_flags(flags: Tensor) -> Tensor:
    """bool (n,) as uint8 (⌈n/8⌉,): eight in a byte, the first in its lowest bit."""
    whole_bytes = F.pad(flags.view(torch.uint8), (0, -len(flags) % 8))
    return pack(whole_bytes, 1, len(flags))


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """bool (count,) again."""
    return unpack(packed, 1, 8 * len(packed))[:count].view(torch.bool)


def two_values(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The lower value, the higher, and where that is; None if there are more than two."""
    low, high = numbers.aminmax()
    is_not_low = numbers != low
    # As many are not the low as are the high. In a dry run all that is compared is equal.
    if not torch.equal(is_not_low.sum(), (numbers == high).sum()):
        return None
    return low, high, is_not_low


# ------------------------------------------------------------------ outputs of ReLU

_MARGIN = 1 + 2**-6  # the bfloat16 of a scale may be 2⁻⁷ above it


def raised(numbers: Tensor, group: int, bits: int) -> Tensor:
    """float32 (n,): what is above zero is a step of its group higher, so that none rounds to zero.

    Backward asks a ReLU's output one question: is it zero?
    """
    groups = F.pad(numbers.float(), (0, -len(numbers) % group)).view(-1, group)
    steps = groups.amax(1, keepdim=True) * (_MARGIN / (2**bits - 2))
    return (groups + steps).mul_(groups > 0).view(-1)[: len(numbers)]


def lowered_(numbers: Tensor, steps: Tensor, group: int) -> Tensor:
    """The opposite, with the steps (⌈n/group⌉,) that the rounding took; zero stays alone."""
    above_zero = numbers > 0
    whole = len(numbers) // group
    numbers[: whole * group].view(whole, group).sub_(steps[:whole, None])
    numbers[whole * group :].sub_(steps[-1:])
    return numbers.clamp_(min=torch.finfo(numbers.dtype).tiny).mul_(above_zero)


# ------------------------------------------------------------------ the context


@dataclass
class Entry:
    """The storages of one kind."""

    storages: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass
class Report:
    """What was saved for backward, by kind, and what it takes now."""

    kinds: dict[str, Entry] = field(default_factory=lambda: defaultdict(Entry))

    def add(self, kind: str, bytes_before: int, bytes_after: int) -> None:
        entry = self.kinds[kind]
        entry.storages += 1
        entry.bytes_before += bytes_before
        entry.bytes_after += bytes_after

    @property
    def summary(self) -> str:
        """A line for each kind, the largest first."""
        entries = sorted(self.kinds.items(), key=lambda item: -item[1].bytes_before)
        return "\n".join(
            f"{kind:<20} {entry.storages:>4} × {format_bytes(entry.bytes_before):>12} → "
            f"{format_bytes(entry.bytes_after):>12}"
            for kind, entry in entries
        )


def compressed_activations(
    bits: int = 8,
    group: int = 256,
    *,
    mode: Mode | None = None,
    min_numel: int = 1024,
    generator: torch.Generator | None = None,
    leave_alone: Callable[[Facts], bool] | None = None,
    kernel: CodingKernel = TORCH,
) -> AbstractContextManager[Report]:
    """Keep what is saved for backward inside `with` in `bits` a number: 8, 4 or 2.

        with compressed_activations(bits=4) as report:
            loss = model(tokens, targets)
        loss.backward()

    mode         "nearest" or "stochastic"; None: the nearest at 8 bits, stochastic below
    min_numel    a storage of fewer numbers is small
    generator    of stochastic rounding; None: this module's own, one for each device. They run on
                 from step to step, so that no two steps err alike, and nobody else draws from them
    leave_alone  is handed the Facts of each storage; where it returns True, nothing is encoded
    kernel       what encodes and decodes numbers; memlab.kernels.compression has kernels for it

    No change of the model, and any number of backward passes. ValueError for bits, a group or a
    mode that the kernel refuses.
    """
    if mode is None:
        mode = "nearest" if bits == 8 else "stochastic"
    kernel.encode(torch.empty(0, device="cpu"), bits=bits, block=group, mode=mode)  # or raise
    return _compressing(Compression(bits, group, mode, min_numel, generator, leave_alone, kernel))


@contextmanager
def _compressing(compression: "Compression") -> Iterator[Report]:
    # A mode costs a little at each call of torch: only where it makes a difference.
    attention = compression.attention if compression.bits < 8 else nullcontext()
    with attention, encoded(compression.choose):
        yield compression.report


_TORCHS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class _Attention(TorchFunctionMode):
    """Knows whether torch's attention is running, or memlab's, by its name."""

    runs = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TORCHS and getattr(func, "__name__", "") != "flash_attention":
            return func(*args, **(kwargs or {}))
        self.runs = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.runs = False


@dataclass(frozen=True)
class Compression:
    """The settings of `compressed_activations`, and the report."""

    bits: int
    group: int
    mode: Mode
    min_numel: int
    generator: torch.Generator | None
    leave_alone: Callable[[Facts], bool] | None
    kernel: CodingKernel = TORCH
    report: Report = field(default_factory=Report)
    attention: _Attention = field(default_factory=_Attention)

    def choose(self, facts: Facts) -> Encode | None:
        kind = kind_of(facts, self.min_numel, self.attention.runs)
        if self.leave_alone is not None and self.leave_alone(facts):
            kind = "left alone as asked"
        if kind in self._encoders:
            return partial(self._encode, kind)
        self.report.add(kind, facts.bytes, facts.bytes)
        return None

    def _encode(self, kind: str, numbers: Tensor) -> Decode | None:
        form = self._encoders[kind](self, numbers)
        if form is None:
            kind, form = WITHOUT_GRADIENT, (None, numbers.nbytes)
        decode, nbytes = form
        self.report.add(kind, numbers.nbytes, nbytes)
        return decode

    def _rounded(self, numbers: Tensor) -> tuple[Decode, int]:
        q = self._quantized(numbers, self.bits)
        return partial(self.kernel.decode, q), q.nbytes

    def _attended(self, numbers: Tensor) -> tuple[Decode, int]:
        q = self._quantized(numbers, 8)
        return partial(self.kernel.decode, q), q.nbytes

    def _rectified(self, numbers: Tensor) -> tuple[Decode, int]:
        q = self._quantized(raised(numbers, self.group, self.bits), self.bits)
        return partial(_unrectified, self.kernel, q, numbers.dtype), q.nbytes

    def _flags(self, flags: Tensor) -> tuple[Decode, int]:
        packed = pack_flags(flags)
        return partial(unpack_flags, packed, len(flags)), packed.nbytes

    def _two_values(self, numbers: Tensor) -> tuple[Decode, int] | None:
        if (found := two_values(numbers)) is None:
            return None
        low, high, is_high = found
        flags, nbytes = self._flags(is_high)
        return lambda: torch.where(flags(), high, low), nbytes + low.nbytes + high.nbytes

    def _quantized(self, numbers: Tensor, bits: int) -> Quantized:
        generator = self.generator
        if generator is None and not isinstance(numbers, FakeTensor):
            generator = _own_generator(numbers.device)
        return self.kernel.encode(
            numbers, block=self.group, bits=bits, mode=self.mode, generator=generator
        )

    _encoders: ClassVar = {
        NUMBERS: _rounded,
        RECTIFIED: _rectified,
        ATTENDED: _attended,
        FLAGS: _flags,
        TWO_VALUES: _two_values,
    }


def _unrectified(kernel: CodingKernel, q: Quantized, dtype: torch.dtype) -> Tensor:
    return lowered_(kernel.decode(q), q.scales.float(), q.block).to(dtype)


@cache
def _own_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)
