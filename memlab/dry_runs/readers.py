"""Functions that access a tensor's memory in C++, which fails on fake tensors.

The lengths of packed sequences and the indices of `tensor_split` are passed as real tensors if
their values are known (known_values.py). Otherwise the error names the user's line.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_packed_sequence

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import FakeTensor, packing_operator, unpacking_operator
from memlab.metering.frames import user_line

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _with_real_batch_sizes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with real batch sizes as its second argument."""
    if len(args) > 1 and isinstance(args[1], FakeTensor) and _is_batch_sizes(args[1]):
        args = (args[0], _real_values(args[1], function), *args[2:])
    return function(*args, **kwargs)


def _is_batch_sizes(tensor: torch.Tensor) -> bool:
    """Return whether the argument is batch sizes, not the state of a layer with unpacked input."""
    return tensor.dtype == torch.int64


class _Packing(torch.autograd.Function):
    """torch's packing operator with a Python backward; torch's reads batch sizes in C++."""

    @staticmethod
    def forward(
        ctx: Any, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        data, batch_sizes = packing_operator(padded, lengths, batch_first)
        ctx.mark_non_differentiable(batch_sizes)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(batch_sizes)
        ctx.shape, ctx.batch_first = padded.shape, batch_first
        return data, batch_sizes

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None]:
        """The gradient is stored time-major, even for batch_first."""
        first, second, *features = ctx.shape
        if not ctx.batch_first:
            return gradient.new_zeros(ctx.shape), None, None
        return gradient.new_zeros((second, first, *features)).transpose(0, 1), None, None


def _pack_padded_sequence(
    padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _Packing.apply(padded, lengths, batch_first)


def _pad_packed_sequence(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the same operators as torch's version, which accesses sizes and lengths in C++."""
    sizes = _real_values(batch_sizes, pad_packed_sequence).tolist()
    T, B = max(len(sizes), total_length), sizes[0]
    padded = torch.full((T, B, *data.shape[1:]), padding_value, dtype=data.dtype)
    begin, offset = 0, 0
    lengths: list[int] = []
    for end, (size, following) in enumerate(pairwise((*sizes, 0)), start=1):
        if size != following:
            block = data[offset : offset + (end - begin) * size]
            padded[begin:end, :size].copy_(block.view(end - begin, size, *data.shape[1:]))
            lengths = [end] * (size - following) + lengths
            offset += (end - begin) * size
            begin = end
    lengths_of_all = torch.tensor(lengths, dtype=torch.int64)
    return (padded.transpose(0, 1) if batch_first else padded), lengths_of_all


def _tensor_split(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    indices = "tensor_indices_or_sections"
    if indices in kwargs:
        args, kwargs = (kwargs.pop(indices), *args), kwargs
    if args and isinstance(args[0], FakeTensor):
        args = (_real_values(args[0], torch.tensor_split), *args[1:])
    return torch.tensor_split(tensor, *args, **kwargs)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Take the mean as torch's version does, which moves or fills the lengths in C++."""
    lengths = input_lengths, target_lengths
    if reduction != "mean":
        return F.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    losses = F.ctc_loss(log_probs, targets, *lengths, blank, "none", zero_infinity)
    if isinstance(target_lengths, torch.Tensor):
        divisors = target_lengths.to(losses.device).clamp_min(1)
    else:
        divisors = torch.empty(len(target_lengths), dtype=losses.dtype, device=losses.device)
        divisors = divisors.clamp_min(1)
    return (losses / divisors).mean()


def _real_values(tensor: torch.Tensor, function: Callable[..., Any]) -> torch.Tensor:
    if not known_values.is_known(tensor):
        raise ValueError(
            f"{user_line()}: {function.__name__} reads lengths or indices from a tensor whose "
            f"values are unknown in a dry run; create the tensor from Python integers"
        )
    return known_values.real(tensor)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    packing_operator: _pack_padded_sequence,
    unpacking_operator: _pad_packed_sequence,
    F.ctc_loss: _ctc_loss,
    **{
        f: partial(_with_real_batch_sizes, f) for f in (getattr(torch, name) for name in _RECURRENT)
    },
}
