"""Gradient accumulation: the gradient of a large batch, from small ones one after the other.

Saves    the activations of every micro-batch but the one at work.
Costs    no byte in float32: autograd adds to `.grad` anyway. Weights in bf16 or fp16 get a float32
         buffer, 4 bytes each: 256 gradients added in bf16 are 1.4 % off. In time, what smaller
         batches leave idle of the device.
Source   the arithmetic is everybody's; that most had it wrong, transformers #34191 and torchtune
         #1875 found in 2024.

The loss of a batch is a mean over tokens. Micro-batches have different numbers of them, because
padding and prompts are masked, so the mean of their means is another number: a token counts more
in a micro-batch where few others do. Right is

    loss = Σ over the window's tokens / their number        gradient = Σ ∂(loss of a token) / number

The number is known at the end of the window. So each micro-batch sends back the *sum* of its
losses, and the gradients are divided once, after the last; only then can they be clipped.

    for window in windows(micro_batches, 8):  # the last may be shorter: its own number divides it
        optimizer.zero_grad()
        loss, tokens = accumulate(window, sum_of_losses, model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

What no accumulation can repair: layers that look across the batch (BatchNorm) and losses that do
(contrastive ones) see micro-batches, not the batch.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

LOW_PRECISION = (torch.bfloat16, torch.float16)

Batch = TypeVar("Batch")


class Accumulated(NamedTuple):
    """The mean loss of a window's tokens (before its end: the sum), without a graph, and how many
    tokens there are."""

    loss: Tensor
    tokens: float | Tensor


def accumulate(
    micro_batches: Iterable[Batch],
    sum_of_losses: Callable[[Batch], tuple[Tensor, float | Tensor]],
    parameters: Iterable[nn.Parameter],
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Accumulated:
    """Leave in `.grad` the gradient of the mean loss over all tokens of all micro-batches.

    `sum_of_losses(micro_batch)` returns the sum of the losses of its tokens, such as
    `F.cross_entropy(logits, targets, reduction="sum")`, and the number of tokens in that sum; or
    both divided by one number, where a sum that is scaled would overflow float16. A
    micro-batch whose tokens are all masked counts nothing; where all are, gradients and loss are
    zero. `no_sync` is that of DistributedDataParallel: all micro-batches but the last are inside.

    Raises ValueError where there is no micro-batch, where gradients are there before, and where
    none arrives.
    """
    parameters = list(dict.fromkeys(parameters))
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError(
            "some parameters have a gradient already, which would be divided by the number of "
            "tokens too; call optimizer.zero_grad() before accumulate"
        )
    window: Accumulated | None = None
    with _Float32Sums(parameters) as sums:
        for micro_batch, around in _in_turn(micro_batches, no_sync):
            with around:
                window = _with_one_more(window, *sum_of_losses(micro_batch))
        if window is None:
            raise ValueError("got no micro-batch to accumulate; give at least one")
        loss, tokens = window
        divisor = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)
        _divide((p.grad for p in parameters if p.grad is not None), divisor)
        sums.hand_over(divisor)
    if all(parameter.grad is None for parameter in parameters):
        raise ValueError(
            "no parameter has a gradient after backward; give the parameters of the model that "
            "the loss is of, and no optimizer that steps inside backward: it leaves none to add to"
        )
    return Accumulated(loss / divisor, tokens)


def windows(micro_batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` micro-batches in a row; the last may be shorter, and none is dropped."""
    if size < 1:
        raise ValueError(f"got windows of {size} micro-batches; give at least 1")
    remaining = iter(micro_batches)
    while window := list(islice(remaining, size)):
        yield window


def split(batch: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """The batch as micro-batches of `size` sequences, views of it; the last may be smaller."""
    if size < 1:
        raise ValueError(f"got micro-batches of {size} sequences; give at least 1")
    return list(zip(*(tensor.split(size) for tensor in batch), strict=True))


def _with_one_more(window: Accumulated | None, loss: Tensor, tokens: float | Tensor) -> Accumulated:
    """The sums of losses and tokens after this micro-batch, whose graph goes with its own loss."""
    loss.backward()
    with torch.no_grad():
        if window is None:
            return Accumulated(loss.clone(), tokens)
        return Accumulated(window.loss.add_(loss), window.tokens + tokens)


def _in_turn(
    micro_batches: Iterable[Batch], no_sync: Callable[[], AbstractContextManager[Any]] | None
) -> Iterator[tuple[Batch, AbstractContextManager[Any]]]:
    """Each micro-batch and what is to be around it. Who is last is known one ahead, so with
    `no_sync` two are in memory."""
    if no_sync is None:
        yield from ((micro_batch, nullcontext()) for micro_batch in micro_batches)
        return
    remaining = iter(micro_batches)
    for current in remaining:
        for following in remaining:
            yield current, no_sync()
            current = following
        yield current, nullcontext()


@torch.no_grad()
def _divide(gradients: Iterable[Tensor], divisor: float | Tensor) -> None:
    for gradient in gradients:
        gradient.div_(divisor)


class _Float32Sums:
    """Sums of gradients whose own dtype is too coarse to add in.

    Each gradient is added to its sum and dropped as soon as backward has made it, so of the
    gradients in the low precision never more than one is alive.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.dtype in LOW_PRECISION and p.requires_grad]
        self._sums: dict[nn.Parameter, Tensor] = {}

    def __enter__(self) -> "_Float32Sums":
        self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p in self._parameters]
        return self

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.float()

    def hand_over(self, divisor: float | Tensor) -> None:
        """Give each parameter its sum, divided and only then rounded, as its gradient."""
        while self._sums:
            parameter, total = self._sums.popitem()
            _divide([total], divisor)
            parameter.grad = total.to(parameter.dtype)
