"""Activation compression: keep the activations saved for backward in 8, 4 or 2 bits.

Saves    each float32 activation shrinks from 4 bytes to 1.02 at 8 bits: n elements take
         n·bits/8 + 4·⌈n/256⌉ bytes.
Costs    a pass over each activation to encode it, one for each backward operator that decodes it,
         and gradient errors of about 0.5 % at 8 bits.
Source   Chen et al. 2021 (ActNN), arXiv 2104.14129; Liu et al. 2022 (GACT), arXiv 2206.11357.

Adds to memlab.reference.activation_compression: 4, 2 and 1 bits, stochastic rounding, masks and
ReLU outputs without error, tensors that several operators save, and a report.

The forward pass computes with exact values, so its results are bitwise the same. Only saved tensors
are rounded, in groups of 256 elements with their own scale and offset. Errors do not propagate from
layer to layer.

Round to nearest has an error of at most 1/510 of the group's range at 8 bits. With fewer bits such
errors would bias gradients. Stochastic rounding is unbiased, and gradients are linear in most saved
tensors, so gradients are unbiased too.

    floats that require grad      `bits` per element: activations, and weights cast by autocast
    ReLU outputs                  the same, with a code reserved for zero: backward only checks
                                  whether an output is zero, and one wrong answer in 300 is an error
                                  of 3 %
    bool                          1 bit: masks of masked_fill, and of dropout on CUDA
    floats with two values        1 bit, exact: dropout masks on a CPU, 0 and 1/(1 − p)
    weights                       unchanged: they stay in memory anyway
    other floats                  unchanged: data, buffers, frozen weights, norm statistics, the
      that don't require grad     log-sum-exp of attention. They live elsewhere too, or are small
    one element per row           unchanged: (…, 1) scales the gradient of a whole row
    logarithms                    unchanged: log-probabilities, log-sum-exps. Backward takes their
                                  exponential, so an error of 0.1 would be a factor of 1.1
    small, integers, float64, …   unchanged
    queries and keys              at least 8 bits: fused attention recomputes its probabilities as
                                  exp(q·k − log-sum-exp) from rounded q and k and the exact sum; at
                                  2 bits gradients would be thousands of times too large

Two-value masks are recognized by an in-place write, as dropout does, and then by their contents.

The rules cannot detect operators whose backward divides by a saved tensor (`log`, `sqrt`, `/`) or
uses its sign (`abs`, `clamp`, `leaky_relu`). A small error near zero becomes a large one there; use
`leave_alone` for such tensors.

Attention is detected for torch's functions and memlab's `flash_attention`. With another fused
attention below 8 bits, pass its queries and keys to `leave_alone`.

When hooks are nested, the innermost applies. Around a checkpoint, its inputs are compressed, and
the recomputation starts from the decoded inputs (`check="hash"` reports this as a change). Inside a
checkpoint, compressed tensors are kept, not recomputed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memlab.configs.block_size import BLOCK_SIZE
from memlab.internals.saved_tensors import Decode, Encode, TensorInfo, encoded
from memlab.internals.torch_internals import has_values
from memlab.quantize import (
    Mode,
    Quantized,
    dequantize_blockwise,
    pack,
    quantize_blockwise,
    unpack,
)
from memlab.units import format_bytes

# ------------------------------------------------------------------ what to encode


ACTIVATIONS, RELU_OUTPUTS, QUERIES_AND_KEYS = "activations", "ReLU outputs", "queries and keys"
BOOL_MASKS, TWO_VALUE_MASKS = "bool masks", "two-value masks"
WITHOUT_GRADIENT = "without a gradient"

# Operators whose outputs are attention results: bounded, and gradients are linear in them.
_ATTENTION_OPERATORS = ("ScaledDotProduct", "SafeSoftmax", "Softmax", "FlashAttention")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kind_of(info: TensorInfo, min_numel: int, in_attention: bool = False) -> str:
    """Classify a storage. The constants above are encoded; other kinds are kept unchanged."""
    if info.is_weight:
        return "weights"
    if info.numel < min_numel:
        return "small"
    if info.dtype == torch.bool:
        return BOOL_MASKS
    if info.dtype not in _FLOATS:
        return str(info.dtype).removeprefix("torch.")
    if not info.requires_grad:
        return TWO_VALUE_MASKS if info.version else WITHOUT_GRADIENT
    if info.shape[-1:] == (1,):
        return "one element per row"
    # In 8 bits log-probabilities double a gradient's error; in 2 bits attention's log-sum-exp
    # multiplies it by four.
    if info.operator.startswith("Log"):  # LogSoftmaxBackward0, LogsumexpBackward0, LogBackward0
        return "logarithms"
    # With both in 2 bits and an exact log-sum-exp, exp(q·k − lse) made the gradient 10⁵ times too
    # large.
    if in_attention and not info.operator.startswith(_ATTENTION_OPERATORS):
        return QUERIES_AND_KEYS
    return RELU_OUTPUTS if info.operator == "ReluBackward0" else ACTIVATIONS


# ------------------------------------------------------------------ masks


def pack_bools(bools: Tensor) -> Tensor:
    """Pack bool (n,) into uint8 (⌈n/8⌉,), the first element in the lowest bit."""
    whole_bytes = F.pad(bools.view(torch.uint8), (0, -len(bools) % 8))
    return pack(whole_bytes, 1, len(bools))


def unpack_bools(packed: Tensor, count: int) -> Tensor:
    """Unpack bool (count,)."""
    return unpack(packed, 1, 8 * len(packed))[:count].view(torch.bool)


def two_values(flat: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the lower value, the higher, and a mask of the higher, or None for more values."""
    low, high = flat.aminmax()
    is_not_low = flat != low
    # The elements above the lowest are all at the highest. In a dry run every comparison is equal,
    # and meta tensors, which have no comparison, take the same path.
    if not flat.is_meta and not torch.equal(is_not_low.sum(), (flat == high).sum()):
        return None
    return low, high, is_not_low


# ------------------------------------------------------------------ ReLU outputs

_MARGIN = 1 + 2**-6  # rounding a scale up to bfloat16 can add 2⁻⁷


def shift_up(flat: Tensor, group: int, bits: int) -> Tensor:
    """Shift positive elements up by one step of their group, so that none rounds to zero.

    Return float32 (n,). The backward pass of ReLU only checks whether its output is zero.
    """
    groups = F.pad(flat.float(), (0, -len(flat) % group)).view(-1, group)
    steps = groups.amax(1, keepdim=True) * (_MARGIN / (2**bits - 2))
    return (groups + steps).mul_(groups > 0).view(-1)[: len(flat)]


def shift_down_(flat: Tensor, steps: Tensor, group: int) -> Tensor:
    """Undo `shift_up` in place with the quantizer's steps (⌈n/group⌉,); only zeros become zero."""
    above_zero = flat > 0
    whole = len(flat) // group
    flat[: whole * group].view(whole, group).sub_(steps[:whole, None])
    flat[whole * group :].sub_(steps[-1:])
    return flat.clamp_(min=torch.finfo(flat.dtype).tiny).mul_(above_zero)


# ------------------------------------------------------------------ the context manager


@dataclass
class KindTotals:
    """Storages of one kind, and their bytes."""

    storages: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass
class CompressionReport:
    """The bytes saved for backward, by kind, before and after compression."""

    kinds: dict[str, KindTotals] = field(default_factory=lambda: defaultdict(KindTotals))

    def add(self, kind: str, bytes_before: int, bytes_after: int) -> None:
        totals = self.kinds[kind]
        totals.storages += 1
        totals.bytes_before += bytes_before
        totals.bytes_after += bytes_after

    @property
    def summary(self) -> str:
        """Return one line per kind, largest first."""
        entries = sorted(self.kinds.items(), key=lambda item: -item[1].bytes_before)
        return "\n".join(
            f"{kind:<20} {totals.storages:>4} × {format_bytes(totals.bytes_before):>12} → "
            f"{format_bytes(totals.bytes_after):>12}"
            for kind, totals in entries
        )


def compressed_activations(
    bits: int = 8,
    group: int = BLOCK_SIZE,
    *,
    mode: Mode | None = None,
    min_numel: int = 1024,
    generator: torch.Generator | None = None,
    leave_alone: Callable[[TensorInfo], bool] | None = None,
) -> AbstractContextManager[CompressionReport]:
    """Keep tensors saved for backward inside the block in 8, 4 or 2 bits per element.

        with compressed_activations(bits=4) as report:
            loss = model(tokens, targets)
        loss.backward()

    mode         "nearest" or "stochastic"; None: nearest at 8 bits, stochastic below
    min_numel    storages with fewer elements are kept unchanged
    generator    for stochastic rounding; None: this module's generator for each device. It advances
                 from step to step, so that errors differ, and only this module draws from it
    leave_alone  called with the TensorInfo of each storage; return True to keep it unchanged

    The model needs no change, and any number of backward passes is allowed. Raise ValueError for
    bits, a group or a mode that `quantize_blockwise` does not support.
    """
    if mode is None:
        # Stochastic rounding depends on the last bits of matmuls, so gradients differ between CPUs.
        mode = "nearest" if bits == 8 else "stochastic"
    quantize_blockwise(
        torch.empty(0, dtype=torch.float32, device="cpu"), bits=bits, block=group, mode=mode
    )  # validates
    return _compress(Compression(bits, group, mode, min_numel, generator, leave_alone))


@contextmanager
def _compress(compression: "Compression") -> Iterator[CompressionReport]:
    # A function mode slows down every torch call, so use it only where it changes the result.
    attention = compression.attention if compression.bits < 8 else nullcontext()
    with attention, encoded(compression.choose):
        yield compression.report


_TORCH_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class _AttentionDetector(TorchFunctionMode):
    """Detect whether torch's attention, or memlab's by its name, is running."""

    is_running = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TORCH_ATTENTION and getattr(func, "__name__", "") != "flash_attention":
            return func(*args, **(kwargs or {}))
        self.is_running = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_running = False


@dataclass(frozen=True)
class Compression:
    """The settings of `compressed_activations`, and its report."""

    bits: int
    group: int
    mode: Mode
    min_numel: int
    generator: torch.Generator | None
    leave_alone: Callable[[TensorInfo], bool] | None
    report: CompressionReport = field(default_factory=CompressionReport)
    attention: _AttentionDetector = field(default_factory=_AttentionDetector)

    def choose(self, info: TensorInfo) -> Encode | None:
        kind = kind_of(info, self.min_numel, self.attention.is_running)
        if self.leave_alone is not None and self.leave_alone(info):
            kind = "left alone by request"
        if kind in self._encoders:
            return partial(self._encode, kind)
        self.report.add(kind, info.bytes, info.bytes)
        return None

    def _encode(self, kind: str, flat: Tensor) -> Decode | None:
        encoded_form = self._encoders[kind](self, flat)
        if encoded_form is None:
            kind = WITHOUT_GRADIENT
        decode, nbytes = encoded_form or (None, flat.nbytes)
        self.report.add(kind, flat.nbytes, nbytes)
        return decode

    def _encode_activations(self, flat: Tensor) -> tuple[Decode, int]:
        q = self._quantize(flat, self.bits)
        return partial(dequantize_blockwise, q), q.nbytes

    def _encode_queries_and_keys(self, flat: Tensor) -> tuple[Decode, int]:
        q = self._quantize(flat, 8)
        return partial(dequantize_blockwise, q), q.nbytes

    def _encode_relu_outputs(self, flat: Tensor) -> tuple[Decode, int]:
        q = self._quantize(shift_up(flat, self.group, self.bits), self.bits)
        return partial(_decode_relu_outputs, q, flat.dtype), q.nbytes

    def _encode_bools(self, bools: Tensor) -> tuple[Decode, int]:
        packed = pack_bools(bools)
        return partial(unpack_bools, packed, len(bools)), packed.nbytes

    def _encode_two_values(self, flat: Tensor) -> tuple[Decode, int] | None:
        if (found := two_values(flat)) is None:
            return None
        low, high, is_high = found
        bools, nbytes = self._encode_bools(is_high)
        return lambda: torch.where(bools(), high, low), nbytes + low.nbytes + high.nbytes

    def _quantize(self, flat: Tensor, bits: int) -> Quantized:
        generator = self.generator
        if generator is None and has_values(flat):
            generator = _default_generator(flat.device)
        return quantize_blockwise(
            flat, block=self.group, bits=bits, mode=self.mode, generator=generator
        )

    _encoders: ClassVar = {
        ACTIVATIONS: _encode_activations,
        RELU_OUTPUTS: _encode_relu_outputs,
        QUERIES_AND_KEYS: _encode_queries_and_keys,
        BOOL_MASKS: _encode_bools,
        TWO_VALUE_MASKS: _encode_two_values,
    }


def _decode_relu_outputs(q: Quantized, dtype: torch.dtype) -> Tensor:
    return shift_down_(dequantize_blockwise(q), q.scales.float(), q.block).to(dtype)


@cache
def _default_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)
